"""What holds for every test: this machine's own calibration has no part in it."""

import pytest


@pytest.fixture(autouse=True, scope="session")
def _no_ceilings_of_this_machine(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLOPWISE_CEILINGS", str(tmp_path_factory.mktemp("ceilings")))
        yield

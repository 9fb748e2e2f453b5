"""What holds for every test: this machine's own calibration has no part in it, nor has its speed."""

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


@pytest.fixture(autouse=True, scope="session")
def _no_ceilings_of_this_machine(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLOPWISE_CEILINGS", str(tmp_path_factory.mktemp("ceilings")))
        yield

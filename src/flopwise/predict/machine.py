"""What is known of a machine's limits."""

from flopwise.predict.datasheet import from_datasheet
from flopwise.records.ceilings import Ceilings
from flopwise.spec.gpu import Gpu
from flopwise.store.ceilings import load_ceilings


def find_ceilings(gpu: Gpu) -> Ceilings | None:
    """A GPU's ceilings: measured on this machine if it was calibrated, else from the datasheet, if it says enough."""
    measured = load_ceilings(gpu.name)
    return measured or (from_datasheet(gpu) if "fp32" in gpu.peaks else None)

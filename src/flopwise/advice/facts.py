"""What the rules look at: all that is known about one step. What is not known is None, and a rule that needs it is silent."""

import msgspec

from flopwise.analysis.details import Details
from flopwise.analysis.explanation import Explanation
from flopwise.predict.account import Account
from flopwise.records.ceilings import Ceilings
from flopwise.records.run import Point
from flopwise.records.waterfall import Waterfall
from flopwise.spec.gpu import Gpu


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """One step, from all sides."""

    explanation: Explanation | None = None  # its trace
    details: Details | None = None  # of the same trace: waits, chains of kernels, sizes of products
    waterfall: Waterfall | None = None
    point: Point | None = None  # the step measured without a profiler: clocks, memory, telemetry, what really ran
    account: Account | None = None  # of its workload, where that is a model of ours
    ceilings: Ceilings | None = None
    gpu: Gpu | None = None

"""An account: on one GPU its screen, on several a line each."""

from flopwise import units
from flopwise.analysis.reach import Reach
from flopwise.predict.account import Account, GpuAccount
from flopwise.render.account_screen import account_reach, account_screen, work_in_words
from flopwise.render.listing import Heading, Listing
from flopwise.render.screen import Screen

REACH = (Heading("now"), Heading("reachable"), Heading("limit"), Heading("MFU", worth=1))


def account_shown(a: Account) -> Screen | Listing:
    """One screen."""
    return gpus_listing(a) if len(a.gpus) > 1 else account_screen(a)


def gpus_listing(a: Account) -> Listing:
    """An account on several GPUs: predicted now, reachable and limit, and whether it fits."""
    rows = tuple(
        (one.gpu.title, *reach_cells(account_reach(a, one) or Reach(now_ns=0.0)), *_room(one)) for one in a.gpus
    )
    return Listing(
        title=a.workload.label(),
        verdict=f"{work_in_words(a)} Its peak memory is {units.size(a.step.peak_bytes)}.",
        headings=(Heading("GPU", right=False), *REACH, Heading("fits"), Heading("largest batch", worth=2)),
        rows=rows,
        notes=("All of it is predicted: nothing was run.", *a.notes),
        more="One of them: --gpu with one name. All tables: --full",
    )


def _room(one: GpuAccount) -> tuple[str, str]:
    fits = "" if one.fits is None else "yes" if one.fits else "no"
    return fits, str(one.largest_batch) if one.largest_batch else ""


def reach_cells(found: Reach) -> tuple[str, ...]:
    """The cells under REACH."""
    times = (found.now_ns, found.reachable_ns, found.limit_ns)
    share = found.mfu(found.now_ns)
    return (*("" if ns is None else units.duration(ns) for ns in times), "" if share is None else units.percent(share))

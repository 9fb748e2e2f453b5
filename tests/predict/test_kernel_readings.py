"""What kernels read is what they read: of a table the rows asked for, of long rows each pass, of a sum what was in it."""

from flopwise.predict.datasheet import from_datasheet
from flopwise.predict.op_time import op_time
from flopwise.spec.gpu import gpu
from flopwise.work.operation import LOSS, MATMUL, OpWork

H200 = from_datasheet(gpu("h200"))
ROWS, WORDS = 8192, 50_272
WHOLE = 4 * ROWS * WORDS


def loss(op: str, read: int, written: int, shape=(ROWS, WORDS), listed: int = WHOLE) -> float:
    work = OpWork(
        op=op, module="", phase="forward", kind=LOSS, dtype="fp32", read_bytes=read, write_bytes=written, shapes=(shape,),
        reads=((1, listed),), writes=((2, written),),
    )  # fmt: skip
    return op_time(work, H200, cold=float(listed)).ns / 1e6


def test_a_loss_that_picks_a_number_of_each_row_does_not_read_the_rows():
    assert loss("nll_loss_forward", 4 * ROWS, 4) < 0.01
    assert loss("nll_loss_backward", 0, WHOLE) < 1.1 * WHOLE / 4.8e9 / 0.87


def test_rows_that_no_shared_memory_holds_are_read_again():
    short, long = (loss("_log_softmax", WHOLE, WHOLE, shape) for shape in ((ROWS * 491, 1024), (ROWS, WORDS)))
    assert 1.8 < long / short < 2.1  # three readings and one writing beside one of each
    back = loss("_log_softmax_backward_data", 2 * WHOLE, WHOLE)
    assert 1.2 < back / long * (4 / 3) < 2.1


def test_a_product_that_is_added_to_a_sum_reads_and_writes_it():
    def product(*before: tuple[int, ...]) -> float:
        shapes = (*before, (WORDS, 1024), (1024, 768))
        work = OpWork(
            op="addmm", module="", phase="loss", kind=MATMUL, dtype="bf16", flops=2 * WORDS * 1024 * 768, shapes=shapes,
            write_bytes=4 * WORDS * 768,
        )  # fmt: skip
        return op_time(work, H200).ns

    assert product((WORDS, 768)) > product() + 0.9e9 * 8 * WORDS * 768 / 4.8e12
    assert product((768,)) == product()  # a bias is nothing

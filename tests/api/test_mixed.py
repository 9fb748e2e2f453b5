"""Times of two machines do not share a table, or pass a gate, unless they are asked to: for every field that they depend on."""

import json

import msgspec
import pytest

from flopwise.api import sweep as sweep_module
from flopwise.api.compare import compare
from flopwise.api.sweep import sweep
from flopwise.capture.runners.runner import Runner
from flopwise.errors import FlopwiseError, Interrupted
from flopwise.records.events import DeviceInfo
from flopwise.records.run import ERROR, OK, Environment, Gpu, PhaseTimes, Point
from flopwise.spec.sweep import sweep_from
from flopwise.store import list_runs

replace = msgspec.structs.replace
H200 = Gpu(name="NVIDIA H200", memory_bytes=1, sm_count=1, l2_bytes=1, capability="9.0", driver="570.1")
CPU = Environment(flopwise="1", python="3.12", torch="2.11.0", cuda="13.0", cpu="AMD EPYC", cpu_cores=8)
GPU = replace(CPU, gpu=H200)
MATTERS = {
    "gpu": (GPU, replace(GPU, gpu=replace(H200, name="NVIDIA A100")), "NVIDIA H200", "NVIDIA A100"),
    "driver": (GPU, replace(GPU, gpu=replace(H200, driver="580.2")), "driver 570.1", "driver 580.2"),
    "torch": (GPU, replace(GPU, torch="2.13.0"), "torch 2.11.0", "torch 2.13.0"),
    "cuda": (GPU, replace(GPU, cuda="12.6"), "CUDA 13.0", "CUDA 12.6"),
    "cpu": (CPU, replace(CPU, cpu="Z80"), "AMD EPYC", "Z80"),
    "cores": (CPU, replace(CPU, cpu_cores=1), "8 cores", "1 cores"),
    "no gpu": (GPU, replace(CPU, cpu=""), "NVIDIA H200", "a CPU"),
    "torch of a cpu": (CPU, replace(CPU, torch="2.13.0"), "torch 2.11.0", "torch 2.13.0"),
}
SAME = {
    "nothing": (GPU, GPU),
    "host": (GPU, replace(GPU, host="node-7")),
    "cpu beside a gpu": (GPU, replace(GPU, cpu="Z80", cpu_cores=1)),
    "flopwise": (GPU, replace(GPU, flopwise="2")),
    "python": (GPU, replace(GPU, python="3.13")),
    "os": (GPU, replace(GPU, os="Linux 7")),
    "commit": (GPU, replace(GPU, git_commit="0" * 40, git_dirty=True)),
    "switches": (GPU, replace(GPU, switches={"OMP_NUM_THREADS": "1"})),
    "driver unknown": (GPU, replace(GPU, gpu=replace(H200, driver=""))),
    "cuda unknown": (GPU, replace(GPU, cuda="")),
    "cpu unknown": (CPU, replace(CPU, cpu="", cpu_cores=0)),
    "all unknown": (GPU, None),
}
SWEEP = '[base]\nworkload = "tiny"\nbatch = [1, 2, 3, 4]\ndevice = "auto"\n'


class Machine(Runner):
    """Measures nothing; its rows say where they are from, by device. Ctrl-C comes before a batch of `until`."""

    def __init__(self, here, until=9, cluster=False, failing=()):
        self.here = here if isinstance(here, dict) else {"auto": here, "cuda": here}
        self.until, self.cluster, self.failing = until, cluster, failing

    def check(self, trials):
        there = {name: DeviceInfo(environment=one or GPU, device=name) for name, one in self.here.items()}
        return {} if self.cluster else there

    def measure(self, trials, folder, progress, begin):
        for trial in trials:
            if trial.workload.batch == self.until:
                raise KeyboardInterrupt
            times = (PhaseTimes(phase="step", wall_ns=tuple(1_000_000 + 7 * (i % 3) for i in range(40))),)
            status = ERROR if trial.workload.batch in self.failing else OK
            yield Point(key=trial.key(), trial=trial, status=status, phases=times, environment=self.here[trial.device])

    def close(self):
        pass


@pytest.fixture
def on(monkeypatch):
    """Sweeps run on such a machine from now on."""

    def change(*given, **options):
        monkeypatch.setattr(sweep_module, "open_runner", lambda *_: Machine(*given, **options))

    return change


@pytest.fixture
def command(tmp_path, cli):
    """`flopwise VERB WORDS` in this folder of runs."""
    (tmp_path / "s.toml").write_text(SWEEP)
    return lambda verb, *words: cli(verb, *words, "--runs", tmp_path / "runs", cwd=tmp_path)


def rows(runs):
    return b"".join(path.read_bytes() for path in sorted(runs.rglob("points.jsonl")))


def written(ended):
    return " ".join((ended.stdout + ended.stderr).split())


@pytest.mark.parametrize("field", MATTERS)
def test_a_sweep_goes_on_in_another_environment_only_if_asked_and_marks_the_rows(field, on, command, tmp_path):
    one, two, was, now = MATTERS[field]
    on(one, until=3)
    assert command("sweep", "s.toml").returncode == 130
    before = rows(tmp_path / "runs")
    on(two)
    refused = command("sweep", "s.toml")
    assert refused.returncode == 2
    assert refused.stdout == ""
    (line, hint) = refused.stderr.splitlines()
    assert f"was measured with {was}; here is {now}" in line
    assert "--mixed" in hint
    assert rows(tmp_path / "runs") == before  # nothing ran
    mixed = command("sweep", "s.toml", "--mixed", "--full")
    assert mixed.returncode == 0
    assert "points were measured with 2 environments" in written(mixed)
    for name in (was, now if now != "a CPU" else "torch"):
        assert name in written(mixed)
    shown = command("runs", "show", "last", "--format", "csv").stdout
    assert "environment" in shown.splitlines()[0]
    assert len(list_runs(tmp_path / "runs")) == 1


@pytest.mark.one_in(3)
@pytest.mark.parametrize("field", MATTERS)
def test_a_gate_judges_another_environment_only_if_asked_and_the_comparison_is_marked(field, on, command):
    one, two, was, now = MATTERS[field]
    on(one)
    assert command("sweep", "s.toml", "--tag", "a").returncode == 0
    on(two)
    assert command("sweep", "s.toml", "--fresh", "--tag", "b").returncode == 0
    for form in ("table", "json", "csv", "markdown", "github"):
        refused = command("compare", "a", "b", "--fail-above", "10%", "--format", form)
        assert refused.returncode == 3
        assert "error: the gate does not judge: A and B" in refused.stderr
        assert "--mixed" in refused.stderr
        allowed = command("compare", "a", "b", "--fail-above", "10%", "--mixed", "--format", form)
        assert (allowed.returncode, allowed.stderr) == (0, "")
        for ended in (refused, allowed, command("compare", "a", "b", "--format", form)):
            assert form == "csv" or f"A {was}; B {now}" in written(ended)
    assert "across environments" in command("compare", "a", "b").stdout.splitlines()[0]
    assert json.loads(command("compare", "a", "b", "--format", "json").stdout)["across"]
    github = command("compare", "a", "b", "--fail-above", "10%", "--format", "github").stdout
    assert github.startswith("::error title=flopwise compare::the gate does not judge")
    assert command("compare", "a", "a", "--fail-above", "10%").returncode == 0


@pytest.mark.one_in(3)
@pytest.mark.parametrize("field", SAME)
def test_what_does_not_matter_or_is_not_known_never_refuses(field, on, command):
    one, two = SAME[field]
    for first, second in ((one, two), (two, one)):
        on(first, until=3)
        assert command("sweep", "s.toml", "--fresh").returncode == 130
        on(second)
        assert command("sweep", "s.toml", "--tag", "b").returncode == 0
        on(first)
        assert command("sweep", "s.toml", "--fresh", "--tag", "a").returncode == 0
        gate = command("compare", "a", "b", "--fail-above", "10%")
        assert (gate.returncode, gate.stderr) == (0, "")
        assert "across environments" not in gate.stdout
        assert "2 environments" not in gate.stdout


def test_a_slower_row_of_another_gpu_fails_no_gate_unless_asked(on, command, tmp_path):
    on(GPU)
    a = sweep(tmp_path / "s.toml", runs=tmp_path / "runs")
    slow = [replace(p, phases=(PhaseTimes(phase="step", wall_ns=(9_000_000,) * 20),)) for p in a.points]
    slow = [replace(p, environment=MATTERS["gpu"][1]) for p in slow]
    b = replace(a, points=tuple(slow))
    assert (compare(a, b).exit_code(0.03), compare(a, b, mixed=True).exit_code(0.03)) == (3, 1)
    assert compare(a, b).exit_code() == 0


def plan(*devices):
    base = {"workload": "tiny", "batch": [1, 2, 3], "device": list(devices)}
    return sweep_from({"name": "two", "base": base})


def test_a_mixed_run_goes_on_in_either_of_its_environments(on, tmp_path):
    one, two, *_ = MATTERS["gpu"]
    for here, until, mixed in ((one, 2, False), (two, 3, True), (one, 3, False)):
        on(here, until=until)
        with pytest.raises(Interrupted):
            sweep(plan("cuda"), runs=tmp_path, mixed=mixed)
    on(two)
    done = sweep(plan("cuda"), runs=tmp_path)
    assert [point.environment for point in done.points] == [one, two, two]
    assert len(list_runs(tmp_path)) == 1


def test_a_cluster_is_never_asked_where_its_rows_come_from(on, tmp_path):
    one, two, *_ = MATTERS["gpu"]
    on(one, until=2, cluster=True)
    with pytest.raises(Interrupted):
        sweep(plan("cuda"), runs=tmp_path, on="ray")
    on(two, cluster=True)
    done = sweep(plan("cuda"), runs=tmp_path, on="ray")
    assert [point.environment for point in done.points] == [one, two, two]


def test_rows_that_are_measured_again_do_not_stand_in_the_way(on, tmp_path):
    one, two, *_ = MATTERS["gpu"]
    on(one, failing=(1, 2, 3))
    sweep(plan("cuda"), runs=tmp_path)
    on(two, failing=(3,))
    sweep(plan("cuda"), runs=tmp_path, retry_failed=True)  # none of the first stays
    on(one)
    with pytest.raises(FlopwiseError, match="here is NVIDIA H200"):
        sweep(plan("cuda"), runs=tmp_path, retry_failed=True)
    assert sweep(plan("cuda"), runs=tmp_path, retry_failed=True, mixed=True).complete
    sweep(plan("cuda"), runs=tmp_path, retry_failed=True)  # nothing is left to measure


def test_each_device_is_compared_with_its_own_rows(on, tmp_path):
    here = {"cpu": CPU, "cuda": GPU}
    on(here, until=3)
    with pytest.raises(Interrupted):
        sweep(plan("cuda", "cpu"), runs=tmp_path)
    on(here | {"cpu": MATTERS["cpu"][1]})
    with pytest.raises(FlopwiseError, match="here is Z80"):
        sweep(plan("cuda", "cpu"), runs=tmp_path)
    on(here)
    assert sweep(plan("cuda", "cpu"), runs=tmp_path).complete

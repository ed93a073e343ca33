"""What a launcher's variables say of this process, and that half of them is refused."""

from __future__ import annotations

import pytest

from dpo_pack.system.errors import RecipeError
from dpo_pack.system.process import ALONE, first_host, placement, tasks_on_node

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node-a",
    "MASTER_PORT": "29500",
}
BATCH_SCRIPT = {
    "SLURM_JOB_ID": "200505",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_JOB_NODELIST": "gpu[003-004]",
}
SRUN = {
    **BATCH_SCRIPT,
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "gpu[003-004]",
}


def test_a_process_that_nobody_launched_has_no_place() -> None:
    assert placement({"PATH": "/bin", "OMP_NUM_THREADS": "4"}) is None
    assert placement({**BATCH_SCRIPT}) is None, "the batch script itself is no task of a step"
    assert placement({**SRUN, "SLURM_STEP_NUM_TASKS": "1"}) is None


def test_what_torchrun_says_is_taken_and_given_on_unchanged() -> None:
    place = placement(TORCHRUN)
    assert place is not None
    assert place.environment() == TORCHRUN
    assert placement({**SRUN, **TORCHRUN}) == place, "torchrun inside a step of SLURM"


def test_a_launcher_that_starts_one_process_needs_to_say_no_more() -> None:
    assert placement({"WORLD_SIZE": "1"}) == ALONE


def test_a_task_of_slurm_s_step_gets_what_torchrun_would_have_said() -> None:
    place = placement(SRUN)
    assert place is not None
    variables = place.environment()
    port = int(variables.pop("MASTER_PORT"))
    assert variables == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "gpu003",
    }
    assert 1024 < port < 32768
    ranks = [{**SRUN, "SLURM_PROCID": str(rank)} for rank in range(4)]
    assert {(place.address, place.port) for rank in ranks if (place := placement(rank))} == {("gpu003", port)}


@pytest.mark.parametrize("change", [{"SLURM_JOB_ID": "200506"}, {"SLURM_STEP_ID": "1"}])
def test_other_jobs_and_steps_meet_at_another_port(change: dict[str, str]) -> None:
    place, other = placement(SRUN), placement({**SRUN, **change})
    assert place is not None and other is not None
    assert place.port != other.port


def test_an_address_and_a_port_of_the_user_s_stay() -> None:
    place = placement({**SRUN, "MASTER_ADDR": "ib0", "MASTER_PORT": "1234"})
    assert place is not None
    assert (place.address, place.port) == ("ib0", 1234)


@pytest.mark.parametrize(
    ("node_list", "host"),
    [
        ("localhost", "localhost"),
        ("gpu[003-006,010],big1", "gpu003"),
        ("gpu[7,9]", "gpu7"),
        ("big1,gpu[003-006]", "big1"),
        ("rack[1-2]node[08-15]", "rack1node08"),
        ("n[1-3]-ib.cluster", "n1-ib.cluster"),
    ],
)
def test_the_first_host_of_a_compressed_list(node_list: str, host: str) -> None:
    assert first_host(node_list) == host


@pytest.mark.parametrize("node_list", ["", "gpu[1-", "gpu]1", ",a"])
def test_a_list_of_nodes_that_cannot_be_read_asks_for_the_address(node_list: str) -> None:
    with pytest.raises(RecipeError, match="set MASTER_ADDR"):
        first_host(node_list)


def test_tasks_of_each_node() -> None:
    assert [tasks_on_node("2(x3),1", node) for node in range(4)] == [2, 2, 2, 1]
    assert tasks_on_node("8", 0) == 8
    for spec, node in (("2(x3),1", 4), ("many", 0)):
        with pytest.raises(RecipeError, match="SLURM_STEP_TASKS_PER_NODE"):
            tasks_on_node(spec, node)


@pytest.mark.parametrize("missing", ["RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_half_a_launcher_is_named(missing: str) -> None:
    rest = {name: value for name, value in TORCHRUN.items() if name != missing}
    with pytest.raises(RecipeError, match=f"but {missing} is not set; start the processes with"):
        placement(rest)


def test_nonsense_and_mpi_are_refused() -> None:
    for variables, name in (({**TORCHRUN, "RANK": "first"}, "RANK"), ({"PMI_SIZE": "2"}, "PMI_SIZE")):
        with pytest.raises(RecipeError, match=rf"distributed\.num_processes: {name}"):
            placement(variables)
    assert placement({"OMPI_COMM_WORLD_SIZE": "1"}) is None, "one process needs no ranks"

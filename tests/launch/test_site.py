"""Site files: unknown keys, wrong forms and contradictions end in one line that says what to write."""

import pytest

from atlasrl import plan as plans
from atlasrl import schema
from atlasrl import site as sites
from atlasrl.errors import UsageFault

SHIPPED = sorted(path.stem for path in sites.SITES.glob("*.yaml"))


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_site_is_valid_and_survives_the_plan_file(name):
    site = sites.load(name)
    assert sites.parse(site.model_dump(mode="json"), "plan.json") == site


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("slurm.partiton=npu", "unknown key slurm.partiton; did you mean slurm.partition?"),
        ("nick=eth0", "unknown key nick; did you mean nic?"),
        ("slurm.time=forever", "is no Slurm time"),
        ("slurm.extra=[mem=0]", "is no sbatch option"),
        (r'slurm.extra=["--mem=0\n#SBATCH --qos=x"]', "one line"),
        ("slurm.cpus_per_node=0", "greater than 0"),
        ("kind=pbs", "kind: input should be 'local', 'slurm' or 'ssh', found 'pbs'"),
        ("kind=local", "section slurm stands in a site of kind local"),
        ("kind=ssh", "section slurm stands in a site of kind ssh"),
        ("life.fruitless_attempts=0", "greater than 0"),
    ],
)
def test_a_wrong_key_or_value_is_one_line(change, words):
    with pytest.raises(UsageFault) as told:
        sites.load("slurm", [change])
    assert words in str(told.value) and "\n" not in str(told.value)


def test_ssh_needs_hosts():
    with pytest.raises(UsageFault, match="needs its hosts"):
        sites.parse({"kind": "ssh"}, "test")


def test_relative_paths_of_a_site_are_relative_to_its_folder(tmp_path):
    (tmp_path / "mine.yaml").write_text("kind: slurm\nruns: runs\nshared: [data, /abs]\n")
    site = sites.load(str(tmp_path / "mine.yaml"))
    assert site.runs == tmp_path / "runs"
    assert [str(path) for path in site.shared] == [str(tmp_path / "data"), "/abs"]


def test_a_key_that_stands_twice_is_an_error(tmp_path):
    (tmp_path / "twice.yaml").write_text("kind: slurm\nnic: eth0\nnic: eth1\n")
    with pytest.raises(UsageFault, match="'nic' stands twice"):
        sites.load(str(tmp_path / "twice.yaml"))


@pytest.mark.parametrize(
    "text", ["- a\n", "just words\n", "a: [1\n", "!!python/object/apply:os.system ['true']\n", "\x00"]
)
def test_what_is_no_mapping_is_refused_without_running_it(text, tmp_path):
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(UsageFault) as told:
        sites.load(str(tmp_path / "bad.yaml"))
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12:00:00", "12:00:00"),
        ("1:30", "1:30"),
        ("1e-6", 1e-6),
        ("no", "no"),
        ("010", "010"),
        ("0.5", 0.5),
        ("-3", -3),
    ],
)
def test_yaml_1_2_numbers(text, value):
    assert schema.read_yaml(f"key: {text}")["key"] == value


def test_numbers_are_texts_where_slurm_wants_texts():
    site = sites.load("slurm", ["slurm.memory=0", "slurm.time=90", "environment.OMP_NUM_THREADS=8"])
    assert (site.slurm.memory, site.slurm.time, site.environment["OMP_NUM_THREADS"]) == ("0", "90", "8")


def test_the_one_interface_reaches_every_library():
    from atlasrl import recipe as recipes
    from atlasrl.rundir import RunDir

    run, recipe = RunDir("/shared/runs/x"), recipes.load("moonlight-16b-dapo")
    environment = plans.make(recipe, sites.load("slurm", ["nic=ib0"]), run).environment
    names = ("HCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
    assert [environment[name].value for name in names] == ["ib0"] * 3
    cpu = recipes.load("tiny")
    assert plans.make(cpu, sites.load("local"), run).environment["GLOO_SOCKET_IFNAME"].value == "lo"
    assert "GLOO_SOCKET_IFNAME" not in plans.make(cpu, sites.parse({"kind": "slurm"}, "t"), run).environment


def test_nodes_that_share_a_host_start_a_few_at_a_time(monkeypatch):
    """On two cores eight starts at once take 109 s, since Ray gives each 30 s; three at a time 26 s."""
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    local, slurm = sites.load("local"), sites.load("slurm")
    assert (local.joining_at_once, slurm.joining_at_once) == (3, 0)
    asked = slurm.model_copy(update={"ray": slurm.ray.model_copy(update={"join_window": 5})})
    assert asked.joining_at_once == 5

"""What ssh is asked to run, as text: nothing of a site or a path is read by a remote shell as more than a word."""

import os
import subprocess
from pathlib import Path

import pytest

from atlasrl import plan as plans
from atlasrl import recipe as recipes
from atlasrl import site as sites
from atlasrl.errors import UsageFault
from atlasrl.launch import ssh
from atlasrl.rundir import RunDir
from atlasrl.site import Ssh

EVIL = 'it\'s; $(touch owned) `id` "x"'


def plan_for(folder: Path, hosts, *, nodes: int = 2, **site):
    site = sites.parse({"kind": "ssh", "ssh": {"hosts": hosts}, **site}, "test")
    return plans.make(recipes.load("moonlight-16b-dapo"), site, RunDir(folder / "run"), nodes=nodes)


@pytest.fixture
def remote(tmp_path, monkeypatch):
    """An ssh that runs the remote command with this machine's shell, as sshd would."""
    fake = tmp_path / "bin" / "ssh"
    fake.parent.mkdir()
    fake.write_text(
        "#!/bin/sh\n"
        'while [ "$1" != -- ]; do shift; done\n'
        '[ "$2" = down ] && { echo "connect: no route" >&2; exit 255; }\n'
        'exec sh -c "$3"\n'
    )
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_words_arrive_as_words(remote):
    succeeded, said = ssh.ask(Ssh(hosts=["a"]), "a", 'printf "%s|" "$@"', EVIL, "", "a b")
    assert succeeded and said == f"{EVIL}||a b|"
    assert not (remote / "owned").exists()


def test_a_host_that_is_down_is_named_with_ssh_s_own_words(remote):
    answers = ssh.ask_all(Ssh(hosts=["up", "down"]), ["up", "down"], "echo fine", lambda host: [])
    assert answers == {"up": (True, "fine"), "down": (False, "error: down: ssh: connect: no route")}


def test_a_task_starts_detached_and_is_known_by_its_start_time(remote):
    log = remote / "log of it"
    succeeded, said = ssh.ask(Ssh(hosts=["a"]), "a", ssh.START, str(log), "sleep", "60")
    word, pid, started = said.split()
    assert succeeded and word == "started"
    assert os.getsid(int(pid)) == int(pid), "a session of its own: the end of the connection does not reach it"
    assert ssh.ask(Ssh(hosts=["a"]), "a", ssh.IS_ALIVE, pid, started)[1] == "alive"
    assert ssh.ask(Ssh(hosts=["a"]), "a", ssh.TERMINATE, pid, "1")[1] == "gone", (
        "another process with that pid is left alone"
    )
    assert ssh.ask(Ssh(hosts=["a"]), "a", ssh.TERMINATE, pid, started)[1] == "told"
    subprocess.run(["bash", "-c", f"while kill -0 {pid} 2>/dev/null; do sleep 0.05; done"], timeout=10, check=True)
    assert ssh.ask(Ssh(hosts=["a"]), "a", ssh.IS_ALIVE, pid, started)[1] == "gone"


def test_user_port_and_options_come_before_the_host():
    words = ssh.command(Ssh(hosts=["a"], user="rl", port=2222, options=["-oProxyJump=gate"]), "a", "x y")
    assert words[-3:] == ["--", "a", "bash -s -- 'x y'"]
    assert (
        "-oProxyJump=gate" in words and words[words.index("-l") + 1] == "rl" and words[words.index("-p") + 1] == "2222"
    )


def test_a_host_that_looks_like_an_option_stays_a_host():
    assert ssh.command(Ssh(hosts=["-oProxyCommand=touch owned"]), "-oProxyCommand=touch owned")[-3] == "--"


def test_spares_are_shown_and_too_few_hosts_are_refused():
    shown = ssh.preview(plan_for(Path("/srv"), ["a", "b", "c"]))
    assert "hosts        a, b\n" in shown and "spares       c" in shown
    with pytest.raises(UsageFault, match="2 nodes are asked for and the site lists 1 hosts"):
        ssh.preview(plan_for(Path("/srv"), ["a"]))
    with pytest.raises(UsageFault, match="stands twice"):
        ssh.preview(plan_for(Path("/srv"), ["a", "a"]))


def test_set_up_lines_run_before_the_task_and_hostile_paths_stay_words(remote, tmp_path):
    plan = plan_for(tmp_path, ["a", "b"], setup=["export FROM_SETUP=yes"], python="/bin/echo")
    words = ssh._task_words(plan, "job", ["a", "b"], 1)
    shown = subprocess.run(words[1:], capture_output=True, text=True, check=True)
    assert shown.stdout.split() == ["-u", "-m", "atlasrl.launch.ssh_executor", str(tmp_path / "run" / "ssh")]
    asked = subprocess.run([*words[1:-5], "env"], capture_output=True, text=True, check=False)
    assert words[0].endswith("job_1_log.out") and asked.returncode == 0

"""What the command refuses before anything starts, and the words in which it does: tables of command lines."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from phalanx.cli._commands import cli
from tests.support.command import Place, refused

ETCD = "--rdzv-backend=etcd --rdzv-endpoint=127.0.0.1:1 --rdzv-id=x"
TEMPLATE = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"
TWO = "--nproc-per-node=2"

VALUES = {
    "--nproc-per-node": (["0", "-1", "many", "1.5", "", "٣", "1e3", "+2", "auto:2"], "at least 1 … auto, cpu or gpu"),
    "--nnodes": (["0", "4:1", "2:", "1:70000"], "expected "),
    "--node-rank": (["-1"], "expected "),
    "--ranks": (["", ",", "x", "1-0"], "expected ranks"),
    "--local-ranks-filter": (["", ",", "first"], "expected ranks"),
    "--log-max-size": (["0", "-1", "", "1x", "MB", "nan", "inf", "1e400", "0.1"], "expected a size"),
    "--duplicate-stdout-filters": ([",,", "", ","], "expected one or more, between commas"),
    "--duplicate-stderr-filters": ([",,", "", ","], "expected one or more, between commas"),
    "--preload": ([",,", "", ","], "expected one or more, between commas"),
    "--grace": (
        ["-1", "soon", "nan", "5 minutes"],
        "expected a time, 0 or more, like 90 (seconds), 90s, 5m, 2h or inf",
    ),
    "--settle": (["nan"], "expected a time, 0 or more, like"),
    "--linger": (["nan"], "expected a time, 0 or more, like"),
    "--drain": (["nan", "-1"], "expected a time, 0 or more, like"),
    "--hang-timeout": (["inf", "0s"], "expected a time, more than 0, like 90 (seconds), 90s, 5m or 2h"),
    "--orphan-grace": (["-1m"], "expected a time, 0 or more, like 90 (seconds), 90s, 5m or 2h"),
    "--sample": (["-1", "inf", "often"], "expected a time, 0 or more, like 90 (seconds), 90s, 5m or 2h"),
    "--min-uptime": ([""], "expected a time, 0 or more, like 90 (seconds), 90s, 5m or 2h"),
    "--metrics-port": (
        ["0", "-1", "65536", "eighty", "localhost", "localhost:x", "1.5", ""],
        "expected a port, 1 to 65535, or an address and a port, like 0.0.0.0:8080, got ",
    ),
    "--master-port": (["65536", "x"], "expected a whole number, 0 to 65535"),
    "--signals-to-handle": (["TREM", "SIGKILL", "SIGCHLD", "SIGTERM,STOP", ","], ""),
    "--notice": (
        ["USR1", "USR1:", ":60", "USR1:0", "USR1:-1", "USR1:inf", "KILL:60", "FOO:60", ""],
        "expected a signal that a process can handle and a time",
    ),
    "--log-line-prefix-template": (["${rank", "$ {rank}", "${}", "5 $"], "has a $ that begins no variable"),
}
"""An option, values of it that cannot be, and the words that follow the value."""

REFUSED = rf"""
run --nproc-per-node=99999999999 S => '99999999999': there cannot be so many workers
run --nproc-per-node={"9" * 5000} S => 9': there cannot be so many workers
run --nproc_per_nodes 2 S => --nproc-per-node
run --start-method spwan S => spawn
run --detach --stdin 0 S => --detach and --stdin exclude each other
run --detach --log-dir /dev/null S => no command would find it
run --detach --logs-specs own S => --detach and --logs-specs exclude each other
run -r 4 S => 0 (none), 1 (stdout), 2 (stderr) or 3 (both)
run -t 0:3,1 S => '1'
run -r 5:3 {TWO} S => there is no local rank 5; ranks are 0 to 1
run -t 2:3 {TWO} S => --tee: there is no local rank 2
run --local-ranks-filter 0,2,3 {TWO} S => there is no local rank 2, 3
run --ranks 0,7 {TWO} S => --ranks & no rank 7
run --ranks 0-9999999999 S => there can be no rank 9999999999
run --stdin 2 {TWO} S => --stdin & ranks are 0 to 1
run --stdin first S => --stdin & expected a global rank, like 0, or none
run --pty 0 --stdin 0 S => --stdin 0: with --pty, this rank reads from its own terminal
run --pty 2 S => --pty: there is no rank 2; ranks are 0 to 0
run --pty "" S => expected ranks, like 0,1 or 0,4-7
run --pty 0 --log-dir /dev/null S => with --log-dir /dev/null there is none
run --debugpy-wait S => --debugpy-wait needs --debugpy PORT
run --debugpy 65535 {TWO} S => 65535 is no port that 1 more can follow
run --debugpy 0 --no-python S => --debugpy and --no-python exclude each other
run --debugpy 0 --run-path S => --debugpy and --run-path exclude each other
run --debugpy 0 --log-dir /dev/null S => there is no folder for launch.json
run --on-event failed,crashed true S => '--on-event': 'crashed' is no event; expected started, hung, straggler, r
run --on-event failed;hung true S => 'failed;hung' is no event
run --on-event failed, true S => '--on-event': '' is no event
run --on-event failed " " S => failed: expected a command for the shell, as one word, got ' '
signal "" => expected a signal, like USR1, SIGUSR1 or 10
signal FOO => expected a signal, like USR1, SIGUSR1 or 10
signal 0 => expected a signal, like USR1, SIGUSR1 or 10
signal -- -9 => expected a signal, like USR1, SIGUSR1 or 10
run --no-python -m sh => --module & --no-python
run => Missing argument 'SCRIPT'
run "" => does not exist
run sh S => script 'sh' does not exist; to run the program 'sh', give --no-python
run {"x" * 300} => File name too long
run script.py/x.py => script 'script.py/x.py': Not a directory
run scrpit.py => 'scrpit.py' does not exist & did you mean 'script.py'?
run sub/trian.py => did you mean 'sub/train.py'?
run quite-different => 'quite-different' does not exist
run sub => 'sub' is a folder without a __main__.py
run -m script.py => --module: 'script.py' is no module's name
run -m ./script => --module: './script' is no module's name
run -m "" => --module: '' is no module's name
run --log-dir S S => --log-dir & script.py
run --log-dir "" S => '--log-dir': '': expected the name of a folder
run --on-report later S => 'later' is not one of 'never', 'failure', 'always'
run --keep-runs 0 S => '0': expected a whole number, 1 or more
run --role {"x" * 2001} S => --role & expected 2000 characters or less, got 2001
run --run-id {"x" * 1001} S => --run-id & expected 1000 characters or less, got 1001

run --grep "(ab" S => --grep: '(ab' is not a regular expression & missing )
run --grep fine --grep "(loss" S => --grep: '(loss' & missing )
run --exclude "a\pb" S => --exclude: 'a\\pb'
run -C 2 S => --context & needs --grep
run -A 2 --exclude x S => --after-context & needs --grep
run -C 0 -B 1 S => --before-context & needs --grep
run -i S => --ignore-case & needs --grep or --exclude
run -A -1 --grep x S => --after-context & -1
run --timestamps --elapsed S => --timestamps and --elapsed exclude each other
run --fold --log-format json S => --fold: & 'json' cannot be folded
run --log-format xml S => --log-format & xml
run --log-line-prefix-template '$rank ${{rang}}' S => --log-line-prefix-template: there is no ${{rang}}; known are \
${{role_name}}, ${{rank}}, ${{local_rank}}, ${{host}}, ${{hostname}}, ${{time}}
{TEMPLATE}='${{rang}}' run S => Error: {TEMPLATE}: there is no ${{rang}}; known are
{TEMPLATE}='5 $' run S => {TEMPLATE}: '5 $' has a $ that begins no variable
run --log-dir /dev/null --fold S => --log-dir /dev/null: no logs are kept; --fold would have nothing to be about
run --log-dir /dev/null --log-max-size 1MB S => no logs are kept; --log-max-size would have nothing to be about
run --log-dir /dev/null --log-mode 755 S => no logs are kept; --log-mode would have nothing to be about
run --log-dir /dev/null --keep-runs 3 S => no logs are kept; --keep-runs would have nothing to be about
run --log-dir /dev/null --grep x S => no logs are kept; --grep would have nothing to be about
run --log-dir /dev/null --duplicate-stdout-filters x S => no logs are kept; --duplicate-stdout-filters would have

run --backoff 1:x S => --backoff & expected a time, 0 or more, like 90 (seconds), 90s, 5m or 2h
run --backoff 5:1 S => --backoff: 5:1: the second time is the longest
run --backoff 5 S => --backoff: nothing is restarted without --max-restarts N; give that, too
run --backoff-jitter 2 S => expected a part, 0 to 1
run --max-restarts 0 --backoff-jitter 0 S => --backoff-jitter: nothing is restarted
run --max-restarts -1 S => '-1': expected a number of restarts, like 3 & 5/1h
run --max-restarts 3/0 S => '3/0'
run --max-restarts {1 << 63} S => expected a number of restarts
run --min-uptime 5:0 S => like 30s:3
run --min-uptime 5 S => --min-uptime: nothing is restarted
run --max-no-progress 5 S => --max-no-progress: nothing is restarted
run --never-restart-on 5 S => --never-restart-on: nothing is restarted
run --never-restart-on 0 S => '0': expected exit codes, 1 to 255, or names of signals
run --never-restart-on 3 --always-restart-on 3 S => --never-restart-on, --always-restart-on & 3
run --on-expiry kill:5x S => expected a time, 0 or more, like 90 (seconds), 90s, 5m or 2h
run --notice USR1:5x S => a time, more than 0, like USR1:60 or USR1:2m
run --signals-forward KILL S => SIGKILL cannot be passed on
run --signals-forward TERM S => SIGTERM stops the run
run --signals-forward USR3 S => expected names of signals
run --preload js-on S => 'js-on' is not the name of a module
run --preload json,__main__ S => __main__ is the script
run --preload json --no-python true => a binary imports nothing
PYTHON_EXEC=/usr/bin/python3-of-another run --preload json S => PYTHON_EXEC
run --run-path --preload json S => --preload: with --run-path, workers are forks with --start-method fork

run --rdzv-endpoint 192.0.2.1:29500 S => --rdzv-endpoint: '192.0.2.1' & this is the only machine, see --nnodes
run --rdzv-endpoint localhost:port S => --rdzv-endpoint & expected a port, 0 to 65535
run --rdzv-endpoint tcp://localhost:1 S => expected the name or the address of a machine and a port
run --rdzv-backend c10 S => 'c10' is not one of 'static', 'c10d', 'etcd', 'etcd-v2'
run --rdzv-conf timeout S => 'timeout': expected settings, like timeout=60
run --rdzv-conf timeout=60, S => the trouble is with ''
run --rdzv-conf timeout=1x S => timeout: '1x': expected a time, 0 or more, like 90 (seconds), 90s, 5m or 2h
run --rdzv-conf timeout=m S => --rdzv-conf & expected a time, 0 or more, like 90 (seconds), 90s, 5m or 2h
run --rdzv-conf is_host=2 S => is_host: expected yes or no, got '2'
run --rdzv-conf is_host=false S => --rdzv-conf: is_host=false: this is the only machine, see --nnodes
run --rdzv-conf rank=1 S => --rdzv-conf: rank=1: this is the only machine, see --nnodes
run --rdzv-id a --run-id b S => --run-id is 'b', and --rdzv-id is 'a'
run --local-addr 192.0.2.1 S => '192.0.2.1': expected the name or an address of this machine
run --node-rank 1 S => --node-rank: 1: this is the only machine, see --nnodes; its rank is 0
run --nnodes 1:2 S => --nnodes: 1:2: with --rdzv-backend static, a fixed number of machines takes part
run --nnodes 2 --master-addr 192.0.2.1 S => which other machines reach: set PHALANX_JOB_SECRET to the same secret on \
each & --insecure does without & 192.0.2.1:29501
run --nnodes 2 --node-rank 1 --master-addr 192.0.2.1 S => set PHALANX_JOB_SECRET & 192.0.2.1:29501
run --nnodes 2 --rdzv-backend c10d --rdzv-endpoint 192.0.2.1 S => set PHALANX_JOB_SECRET & 192.0.2.1:29400
run --nnodes 2 --rdzv-endpoint a:1,b:2 S => --rdzv-endpoint: expected one machine, that of node rank 0; got 2
run --nnodes 2 --master-port 65535 S => agent_port=PORT is needed: the port of the workers is 65535
run --nnodes 2 --rdzv-conf agent_port=0 S => agent_port: expected whole numbers, 1 to 65535, got '0'
run --nnodes 2 --rdzv-conf agent_port=0655351 S => agent_port: expected whole numbers, 1 to 65535, got '0655351'
run --nnodes 2 --rdzv-conf ca=/dev/null S => ca: it is for an etcd of your own; one of this job's agents has the store
run --nnodes 2 --master-addr 127.0.0.1 --rdzv-conf encrypt=require S => encrypt: require: a secret is needed, of which
run --nnodes 2 --rdzv-backend c10d --rdzv-endpoint 0.0.0.0:1 S => --rdzv-endpoint: expected the name or
run --nnodes 2 --master-addr :: S => --master-addr: expected the name or the address of a machine, by which
run --nnodes 2 --rdzv-endpoint :12399 S => --rdzv-endpoint: expected the machine of node rank 0, like host:
run --nnodes 2 --rdzv-conf encrypt=perhaps S => encrypt: expected auto, require or no, got 'perhaps'
run --nnodes 2 --rdzv-conf away_timeout=soon S => away_timeout: 'soon': expected a time, 0 or more, like
run --nnodes 2 --rdzv-conf secret_file=/dev/null S => secret_file: /dev/null: expected 16 characters or more
run --nnodes 2 --rdzv-backend c10d S => --rdzv-endpoint: expected where the machine is that has the store
run --nnodes 2 --rdzv-backend c10d --rdzv-endpoint a:1,b:2 S => expected one machine, which has the store
run --nnodes 2 --keep S => --keep: one of this job's agents has the store, which ends with the job
run --keep S => --keep: this is the only machine, see --nnodes; it has no store
run --nnodes 2 {ETCD} --rdzv-endpoint= S => --rdzv-endpoint: expected where the etcd is, like host:2379
run --nnodes 2 --rdzv-backend etcd --rdzv-endpoint 127.0.0.1 S => --run-id: the machines of a job find
run --nnodes 1:2 {ETCD} --node-rank 1 S => --node-rank: ranks are given by hand to a fixed number
run --nnodes 2 {ETCD} --run-path --start-method fork S => --start-method: expected 'spawn' or 'forkserver'
run --nnodes 2 {ETCD} --node-rank 2 S => --node-rank: expected 0 to 1, for --nnodes 2; got 2
run --nnodes 2 {ETCD} --rdzv-conf lease_ttl=1 S => lease_ttl: expected whole seconds, 2 to 86400, got '1'
run --nnodes 2 {ETCD} --rdzv-conf lease_ttl=250ms S => lease_ttl: expected whole seconds, 2 to 86400
run --nnodes 2 {ETCD} --rdzv-conf away_timeout=2y S => '2y': expected a time, 0 or more, like
run --nnodes 2 {ETCD} --rdzv-conf password=x S => password: it would be seen by all users of this machine
run --nnodes 2 {ETCD} --rdzv-conf user=x S => --rdzv-conf: user and password_file belong together
run --nnodes 2 {ETCD} --rdzv-conf cert=/dev/null S => --rdzv-conf: cert and key belong together
run --nnodes 2 {ETCD} --rdzv-conf user=x,password_file=/no/x S => password_file: /no/x: No such f
run --nnodes 2 {ETCD} --rdzv-conf ca=/no/x S => --rdzv-conf: ca: /no/x: No such file
run --nnodes 2 {ETCD} --rdzv-conf ca=/dev/null S => --rdzv-conf: ca: /dev/null holds no certificate (PEM)
run --numa-binding node --cpu-bind core S => --numa-binding and --cpu-bind exclude each other
run --cpu-bind cores S => --cpu-bind: 'cores': rank 0: 'cores' is no CPU
run --cpu-bind 0-999999 S => --cpu-bind: '0-999999': rank 0: CPU
run --nice 20 S => '--nice': '20': expected a whole number, -20 to 19
run --rlimit nofile S => '--rlimit': 'nofile': expected limits, each once, like nofile=4096,as=8GiB
run --rlimit nofile=1,nofile=2 S => the trouble is with 'nofile=2'
run --rlimit files=1 S => '--rlimit': 'files' is no resource limit; there are as, core,
run --rlimit nofile=2:1 S => '--rlimit': nofile: the soft limit 2 is above the hard limit 1
run --numa-binding nodes S => 'nodes' is not one of 'node', 'socket', 'exclusive', 'core-complex'
CUDA_VISIBLE_DEVICES= run --numa-binding node S => --numa-binding: node: this machine shows no GPU
CUDA_VISIBLE_DEVICES= run --nproc-per-node gpu S => gpu & VISIBLE_DEVICES
run --event-log-handler consle S => there is no event handler 'consle': there are 'console', 'dynamic_rend
run --logs-specs mine S => there is no 'mine' among the entry points of torchrun.logs_specs and phalanx.logs_
run --logs-specs mine --log-mode 750 S => --logs-specs mine: it is for the plugin & leave --log-mode out

PET_MAX_RESTARTS=x run S => '--max-restarts' (PET_MAX_RESTARTS in the environment) & like 5/1h
PHALANX_NPROC_PER_NODE=x run S => '--nproc-per-node' (PHALANX_NPROC_PER_NODE in the environment) & 'x'
PET_NPROC_PER_NODE=0 run S => '--nproc-per-node' (PET_NPROC_PER_NODE in the environment)
PHALANX_LOG_KEEP=3 run S => --log-keep: files & (--log-keep is PHALANX_LOG_KEEP in the environment)
PHALANX_RANKS=9 run S => there is no rank 9 & (--ranks is PHALANX_RANKS in the environment)
PHALANX_LOG_DIR=/etc/passwd run S => '--log-dir' (PHALANX_LOG_DIR in the environment)
PHALANX_LOG_DIR=/dev/full run S => --log-dir: '/dev/full' is not & (--log-dir is PHALANX_LOG_DIR
PHALANX_GRACE='10 s' run S => (PHALANX_GRACE in the environment): '10 s': expected a time, 0 or more, like 90
PHALANX_HANG_TIMEOUT=-1 run S => '--hang-timeout' (PHALANX_HANG_TIMEOUT in the environment)
PHALANX_TIMESTAMPS=1 PET_ELAPSED=1 run S => (--timestamps is PHALANX_TIMESTAMPS in the environment, --elapsed is PET_
PHALANX_GRACE=1 run --grace -1 S => '--grace' / '--shutdown-timeout': '-1': expected a time, 0 or more
PET_RDZV_CONF=timeout run S => '--rdzv-conf' (PET_RDZV_CONF in the environment)
TORCHELASTIC_SIGNALS_TO_HANDLE=TREM run S => (TORCHELASTIC_SIGNALS_TO_HANDLE in the environment) & TREM
TORCHELASTIC_HEALTH_CHECK_PORT=eighty run S => TORCHELASTIC_HEALTH_CHECK_PORT: expected a port, 1 to 65535
TORCHELASTIC_HEALTH_CHECK_PORT=eighty run --dry-run S => TORCHELASTIC_HEALTH_CHECK_PORT: expected a port, 1 to 65535

rn => there is no command 'rn'; did you mean 'run'?
ps => there is no command 'ps'; did you mean 'status'?
launch => there is no command 'launch'; did you mean 'run'?
prune => there is no command 'prune'; did you mean 'runs prune'?
RUN => there is no command 'RUN'; did you mean 'run'?
log => there is no command 'log'; did you mean 'logs'?
xyz => there is no command 'xyz'; there are run, logs, runs, status, top, report,
ruxx => there is no command 'ruxx'; there are run, logs, runs, status, top, report,
/bin/sh => ; to run a script: phalanx run /bin/sh
train.py => there is no command 'train.py'; to run a script: phalanx run train.py
--nproc-per-node 4 train.py => there is no option '--nproc-per-node' here; it is one of phalanx run
--no-such => there is no option '--no-such'
--verison => there is no option '--verison'; did you mean '--version'?
run --nproc 4 S => there is no option '--nproc'; did you mean '--nproc-per-node'?
run --nproc_per 4 S => there is no option '--nproc-per'; did you mean '--nproc-per-node'?
run --log x S => there is no option '--log'; did you mean '--log-dir' or '--logs-specs' or '--log-
run --log_dirs x S => --log-dir
run --redirect 3 S => there is no option '--redirect'; did you mean '--redirects'?
run --hang-timout 3 S => there is no option '--hang-timout'; did you mean '--hang-timeout'?
run --nnode 2 S => there is no option '--nnode'; did you mean '--nnodes'
run -z S => there is no option '-z'
run --rdzv x S => ; did you mean '--rdzv-id' or '--rdzv-backend' or '--rdzv-
run -np 4 S => -n: it is --nproc-per-node here
run --num_processes 4 S => --num-processes: it is --nproc-per-node here
run --use-env S => --use-env: the rank is in LOCAL_RANK
run --name x S => --name: it is --run-id here
run --env x S => --env: workers inherit the environment of phalanx run
run --quiet S => --quiet: -r 3 keeps the output of the workers in files alone
run --keep-going S => --keep-going: a command that is to go on when another fails is a run of its own
run --restart S => --restart: all workers are started again, see --max-restarts
run --no-standby S => --no-standby: restarts have no standby any more; leave it out
run --seed 1 S => there is no option '--seed' Error
run --debug S => there is no option '--debug'; did you mean '--debugpy' or '--debugpy-wait'?
report -o x => --output needs --html, --bundle or --perfetto: the text goes to stdout
report --html --bundle => --html and --bundle exclude each other: each writes a file of its own
report --html -o / => --output: '/' is a folder; expected a file, or -
report --html -o '' => --output: '' is empty; expected a file, or -
logs --tail 3 => --tail: it is --lines here, or -n
logs --folow => there is no option '--folow'; did you mean '--follow'?
runs prun => there is no command 'prun'; did you mean 'prune'?
runs failed => there is no command 'failed'; did you mean '--state failed'?
runs list => there is no command 'list'; phalanx runs lists all, phalanx logs RUN shows one
runs rm => there is no command 'rm'; did you mean 'prune'?
"""
"""``[VARIABLE=VALUE ...] COMMAND => words & words``, where S is a script."""

ROWS = [line.partition(" => ") for line in REFUSED.replace("\\\n", "").splitlines() if line]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with an empty script, and no variable of ours set."""
    for name in os.environ:
        if name.startswith(("PHALANX_", "PET_", "TORCHELASTIC_", "SLURM_")) or name.endswith("_VISIBLE_DEVICES"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PHALANX_LOG_DIR", str(tmp_path / "logs"))
    for name in ("script.py", "sub/train.py", "log"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


def refuse(here: Path, argv: list[str], env: dict[str, str] | None = None) -> str:
    """The one line of a refusal. No usage error has another exit code, shows a traceback, or starts anything."""
    done = CliRunner().invoke(cli, argv, env=env)
    assert done.exit_code == 2, done.output
    assert isinstance(done.exception, SystemExit)
    assert not (here / "logs").exists()
    return " ".join(done.output.split())


@pytest.mark.parametrize("command,words", [(row[0], row[2]) for row in ROWS], ids=[row[0][:60] for row in ROWS])
def test_a_mistaken_command_line_is_refused(here: Path, command: str, words: str) -> None:
    argv = ["script.py" if word == "S" else word for word in shlex.split(command)]
    count = next(number for number, word in enumerate(argv) if not re.match(r"[A-Z_]+=", word)) if argv else 0
    env = dict(word.split("=", 1) for word in argv[:count])
    shown = refuse(here, argv[count:], env)
    for part in words.split(" & "):
        assert part.removesuffix(" Error") in shown
        assert not part.endswith(" Error") or shown.endswith(part.removesuffix(" Error"))
    assert ("in the environment" in shown) == ("in the environment" in words or "is P" in words)


@pytest.mark.parametrize("option", VALUES)
def test_a_value_that_cannot_be_is_refused(here: Path, option: str) -> None:
    values, words = VALUES[option]
    for value in values:
        shown = refuse(here, ["run", f"{option}={value}", "script.py"])
        assert option in shown
        for part in (repr(value) if value != "SIGTERM,STOP" else value, *words.split(" … ")):
            assert part in shown


@pytest.mark.parametrize(
    "options,words",
    [
        (["--grep", "fine", "--grep", "(?!loss)"], ["--grep: '(?!loss)'", "negative lookahead", "--exclude"]),
        (["--exclude", r"(a)\1"], [r"--exclude: '(a)\\1'", "backreference"]),
    ],
)
def test_what_re2_does_not_have_is_refused(here: Path, options: list[str], words: list[str]) -> None:
    pytest.importorskip("re2", reason="RE2 is not installed")
    shown = refuse(here, ["run", *options, "script.py"])
    assert all(word in shown for word in words)


def test_the_program_refuses_as_the_command_does(place: Place) -> None:
    """All above is in this process: as a program, it has the same exit code, and no traceback."""
    refused(place.run("--grace", "nan", place.write("")), "'nan': expected a time, 0 or more")
    refused(place.program(sys.executable, "-m", "phalanx", "\x1b[2J"), r"there is no command '\x1b[2J'")
    assert not place.logs.exists()


def test_a_script_in_a_folder_that_is_shut_is_refused(place: Place) -> None:
    if os.geteuid() == 0 and shutil.which("setpriv") is None:
        pytest.skip("needs setpriv: root may enter any folder")
    unprivileged = ("setpriv", "--bounding-set", "-dac_override,-dac_read_search", "--") if os.geteuid() == 0 else ()
    folder = Path(place.write("", "shut/script.py")).parent
    folder.chmod(0)
    try:
        done = place.program(*unprivileged, sys.executable, "-m", "phalanx", "run", folder / "script.py")
    finally:
        folder.chmod(0o700)
    refused(done, "/script.py': Permission denied")

"""What runs on a rented machine: pure text. No secret is in any of it; the launch file comes over ssh's stdin.

The dead-man's switch is here: a machine that nobody needs any more destroys itself with its own key (CONTAINER_API_KEY,
which can do nothing else), so that it does not wait for an operator whose laptop has died.
"""

from __future__ import annotations

import shlex

ONSTART_CHARS_MAX = 4000  # vast.ai takes 4096 of onstart and arguments together
UNUSED_S = 1800  # longer than any start: whoever has not come over ssh by then never will
AFTER_WORKER_S = 60  # time to read its last words
HOME = "/tmp/swactor-mq"
READY_WORD, EXIT_WORD = "smq-ready", "smq-exit"
WHEEL_VARIABLE = "SMQ_WHEEL"
"""A bootstrap command that speaks of it gets this program as a wheel: the path of the file on the machine."""

# In ssh sessions the container's environment is not visible: onstart, which sees it, leaves it in a file; process 1 has
# it as well, unless it is a program that overwrites it, as sshd.
_DESTROY = r"""smq_destroy() {
  for pair in $( (cat /tmp/swactor-mq/instance; tr '\0' '\n' </proc/1/environ) 2>/dev/null |
    grep -E '^CONTAINER_(ID|API_KEY)=.'); do export "$pair"; done
  for i in 1 2 3 4 5 6 7 8 9 10; do
    if command -v curl >/dev/null; then
      printf 'header = "Authorization: Bearer %s"\n' "$CONTAINER_API_KEY" |
        curl -fsS -m 30 -K - -X DELETE "$SMQ_URL/api/v0/instances/$CONTAINER_ID/" >/dev/null && return
    else
      python3 -c 'import os,urllib.request as u
u.urlopen(u.Request(os.environ["SMQ_URL"]+"/api/v0/instances/"+os.environ["CONTAINER_ID"]+"/",method="DELETE",
headers={"Authorization":"Bearer "+os.environ["CONTAINER_API_KEY"]}),timeout=30)' && return
    fi
    sleep 15
  done
}
"""


def onstart(own: str, base_url: str, max_hours: float | None, unused_s: int = UNUSED_S) -> str:
    """The container's onstart: the user's own commands, then the two switches that need no operator."""
    limit = f"( sleep {int(max_hours * 3600) + 300}; smq_destroy ) >/dev/null 2>&1 &\n" if max_hours else ""
    return (f"{own.rstrip()}\n" if own else "") + (
        f"(umask 077; mkdir -p {HOME}; env | grep ^CONTAINER_ >{HOME}/instance)\n"
        f"touch ~/.no_auto_tmux; export SMQ_URL={shlex.quote(base_url)}\n{_DESTROY}"
        f"( sleep {unused_s}; [ -e {HOME}/pid ] || smq_destroy ) >/dev/null 2>&1 &\n{limit}"
    )


def upload(name: str, size: int) -> str:
    """Run over ssh with a file on stdin: whole in HOME under that name, or not at all."""
    path = f"{HOME}/{shlex.quote(name)}"
    return (
        f"set -e; umask 077; mkdir -p {HOME}; cat >{path}.part; [ $(wc -c <{path}.part) = {size} ]\n"
        f"mv {path}.part {path}; echo {READY_WORD}\n"
    )


def deploy(bootstrap: str, launch_bytes: int, base_url: str, after_s: int = AFTER_WORKER_S, wheel: str = "") -> str:
    """Run once over ssh, launch file on stdin: puts it away and starts the worker in a session of its own.

    bootstrap: the user's command, to which the worker's arguments are appended; wheel: the name that was uploaded.

    The worker outlives a broken connection. When it ends (its lease is lost, it crashed), its machine goes, too.
    """
    worker = f'{bootstrap.strip()} "$@"'
    inner = (
        f"{_DESTROY}export SMQ_URL={shlex.quote(base_url)}\n"
        + (f"export {WHEEL_VARIABLE}={HOME}/{shlex.quote(wheel)}\n" if wheel else "")
        + f"sh -c {shlex.quote(worker)} sh --launch {HOME}/launch.json </dev/null >{HOME}/out 2>{HOME}/err &\n"
        f"echo $! >{HOME}/worker; wait $!; echo $? >{HOME}/status.new; mv {HOME}/status.new {HOME}/status\n"
        f"rm -f {HOME}/launch.json; sleep {after_s}; smq_destroy\n"
    )
    return (
        f"set -e; umask 077; mkdir -p {HOME}; cd {HOME}\n"
        # A second deployment after a lost answer must not start a second worker.
        f"if [ -e pid ]; then cat >/dev/null; echo {READY_WORD}; exit 0; fi\n"
        f"head -c {launch_bytes} >launch.json; [ $(wc -c <launch.json) = {launch_bytes} ]; : >out; : >err\n"
        f"setsid sh -c {shlex.quote(inner)} </dev/null >/dev/null 2>&1 &\n"
        f"echo $! >pid; echo {READY_WORD}\n"
    )


def follow(out: int, err: int) -> str:
    """Print the worker's lines, each with 1 (stdout) or 2 (stderr) before it, after as many as were read already, and
    when it has ended its exit status."""
    return (
        f"cd {HOME} || exit 9\nwhile [ ! -s worker ]; do sleep 0.1; done; w=$(cat worker)\n"
        f"tail --pid=$w -n +{out + 1} -f out | sed -u 's/^/1/' &\n"
        f"tail --pid=$w -n +{err + 1} -f err | sed -u 's/^/2/' &\n"
        f"wait\nfor i in 1 2 3 4 5; do [ -e status ] && break; sleep 0.2; done\necho; echo {EXIT_WORD} $(cat status)\n"
    )

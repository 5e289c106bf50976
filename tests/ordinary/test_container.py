"""Tests the daemon in a container whose first process reaps no children of others."""

import json
import os
import sys

import pytest
import rig as r

# The first process of a PID namespace. It reaps the processes that it starts, and no others.
INIT = r"""
import json
import os
import subprocess
import sys
import time

vshunt, bench, folder = sys.argv[1:]
socket = f"{folder}/vm0.sock"
serve = [vshunt, "serve", "--control", f"{folder}/c.sock", "--export", f"type=vhost-user-blk,name=vm0,disk=d0,socket={socket}", "--disk"]
left = {}

def zombies():
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        name, state = open(f"/proc/{pid}/stat").read().split("(", 1)[1].rsplit(")", 1)
        if state.split()[0] == "Z":
            found.append(name)
    return found

daemon = subprocess.Popen([*serve, "name=d0,format=null,size=1G"], stderr=subprocess.DEVNULL)
while not os.path.exists(socket):
    if daemon.poll() is not None:
        sys.exit("the daemon ends at once")
    time.sleep(0.02)
# A front end, so that there are receivers.
subprocess.run([bench, "blk", "--socket", socket, "--runtime", "100ms", "--quiet"], check=True, stdout=subprocess.DEVNULL)
daemon.terminate()
left["ended"] = [daemon.wait(), zombies()]
refused = subprocess.run([*serve, f"name=d0,file={folder}/none"], stderr=subprocess.DEVNULL)
left["refused"] = [refused.returncode, zombies()]
print(json.dumps(left))
"""


@pytest.mark.root
def test_no_zombie_is_left(rig):
    """The daemon reaps its helper processes: when it is told to end, and when its start fails."""
    if os.geteuid() != 0:
        raise r.Skipped("not root: no PID namespace")
    argv = [r.tool("unshare", "util-linux"), "--pid", "--fork", "--mount-proc", "--kill-child", sys.executable, "-c", INIT]
    done = r.run([*argv, r.binary("vshunt"), r.binary("vshunt-bench"), rig.dir], timeout_s=120, check=False)
    r.require(done.returncode == 0, f"ended with {done.returncode}: {done.stdout}{done.stderr}")
    r.require(json.loads(done.stdout) == {"ended": [0, []], "refused": [1, []]}, done.stdout)

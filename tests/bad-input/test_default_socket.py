"""Another user listens where the control socket is by default: commands must give it nothing."""

import os

import as_user
import pytest
import rig as r

OTHER, USER = 4002, 4001
LISTENER = """\
import os, socket, sys
s = socket.socket(socket.AF_UNIX)
s.bind(sys.argv[1])
os.chmod(sys.argv[1], 0o666)
s.listen()
print("ready", 6 * 7, flush=True)
clients = []
while True:
    clients.append(s.accept()[0])
"""


@pytest.mark.root
def test_another_users_daemon_gets_no_descriptor(rig):
    """The folder is open to all, as /tmp is. The user has to name the socket to use it all the same."""
    with as_user.folder(rig, "home", USER) as home:
        folder, image = home / "run", rig.image("secret.img", 1 << 20, home)
        folder.mkdir()
        folder.chmod(0o1777)
        os.chown(image, USER, USER)
        image.chmod(0o600)
        program = as_user.program(home, USER)
        argv = [*as_user.words(OTHER), as_user.python(OTHER), "-c", LISTENER, folder / "vshunt.sock"]
        listener = r.Child(rig, "listener", argv, cwd="/")
        r.wait_for("it listens", lambda: "ready 42" in listener.output() or not listener.running())
        r.require(listener.running(), listener.tail())
        env = {**os.environ, "XDG_RUNTIME_DIR": str(folder)}
        env.pop("VSHUNT_CONTROL", None)
        for command in (["status"], ["disk", "add", f"name=d,file={image}"]):
            done = r.run([*as_user.words(USER), program, *command], check=False, env=env, cwd=folder)
            r.message_of(done, f"user {OTHER} listens", "-c")

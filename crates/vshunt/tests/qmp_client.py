"""Drives a vshunt control socket with QEMU's own client library (PyPI: qemu.qmp). Run by qmp_py.rs."""

import asyncio
import sys

from qemu.qmp import ExecuteError, QMPClient
from qemu.qmp.events import EventListener


async def refused(qmp, command, arguments, error_class):
    try:
        await qmp.execute(command, arguments)
    except ExecuteError as error:
        assert error.error_class == error_class, error
    else:
        raise AssertionError(f"{command} was expected to fail")


async def main(path):
    qmp = QMPClient("test")
    await qmp.connect(path)
    version = await qmp.execute("query-version")
    assert version["package"].startswith("vshunt "), version
    names = {command["name"] for command in await qmp.execute("query-commands")}
    assert {"queue-attach", "block-export-add", "quit"} <= names, names

    with qmp.listener("WORKER_CREATED") as created:
        await refused(qmp, "worker-new", {"name": "é😀"}, "GenericError")
        made = await qmp.execute("worker-new", {"name": "fast-1"})
        event = await asyncio.wait_for(created.get(), 10)
        assert event["data"] == made, event
    workers = await qmp.execute("query-workers")
    assert workers[-1]["name"] == "fast-1", workers

    await qmp.execute("blockdev-add", {"driver": "null-co", "node-name": "n0", "size": 1 << 20})
    nodes = await qmp.execute("query-named-block-nodes")
    assert [node["node-name"] for node in nodes] == ["n0"], nodes
    await refused(qmp, "blockdev-del", {"node-name": "n1"}, "DeviceNotFound")
    await refused(qmp, "blockdev-del", {"name": "n0"}, "GenericError")
    await refused(qmp, "no-such-command", {}, "CommandNotFound")
    await qmp.execute("blockdev-del", {"node-name": "n0"})

    shutdown = EventListener("SHUTDOWN")
    qmp.register_listener(shutdown)
    await qmp.execute("quit")
    event = await asyncio.wait_for(shutdown.get(), 10)
    assert event["data"]["reason"] == "host-qmp-quit", event
    try:
        await qmp.disconnect()
    except EOFError:
        pass  # the daemon was first, as QEMU is on quit
    print("all good")


asyncio.run(main(sys.argv[1]))

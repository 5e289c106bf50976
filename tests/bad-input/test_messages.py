"""Tests messages and requests that a correct front end does not send."""

import os
import random
import struct
import time

import peer as p
import pytest
import rig as r


def test_a_sane_front_end_is_served_first(served):
    served.sane()


def hung_up(c):
    r.require(c.closed(), "the back-end keeps the connection")


def refused(answer):
    r.require(answer == p.REFUSED, "it was accepted")


def test_garbage_in_place_of_a_header(c):
    c.send(random.Random(1).randbytes(4096))
    hung_up(c)


def test_a_size_of_four_gigabytes(c):
    c.message(p.SET_FEATURES, b"\0" * 8, size=0xFFFF_FFF0)
    hung_up(c)


def test_a_request_that_is_not_there(c):
    c.handshake()
    refused(c.order(4000, b"\0" * 8))


def test_what_is_for_a_network_device(c):
    c.handshake()
    refused(c.order(p.NET_SET_MTU, struct.pack("<Q", 1500)))
    refused(c.order(p.SEND_RARP, b"\2\0\0\0\0\1\0\0"))
    c.message(p.NET_SET_MTU, b"\0" * 3)
    hung_up(c)


def test_a_version_other_than_1(c):
    c.message(p.GET_FEATURES, flags=2)
    hung_up(c)


def test_a_payload_that_is_too_short(c):
    c.handshake()
    refused(c.order(p.SET_VRING_NUM, b"\0" * 3))


def test_a_memory_table_without_its_fd(c):
    c.handshake()
    refused(c.table([(p.GUEST, p.MEMORY, p.USER, 0)], []))


def test_a_memory_table_with_forty_fds(c):
    c.handshake()
    fds = [os.open("/dev/null", os.O_RDWR) for _ in range(40)]
    try:
        c.message(p.SET_MEM_TABLE, struct.pack("<IIQQQQ", 1, 0, p.GUEST, p.MEMORY, p.USER, 0), fds=fds)
    except p.Closed:
        pass
    finally:
        for fd in fds:
            os.close(fd)
    hung_up(c)


def test_a_memory_table_of_something_that_is_no_memory(c):
    c.handshake()
    fd = os.open("/dev/null", os.O_RDWR)
    try:
        refused(c.table([(p.GUEST, p.MEMORY, p.USER, 0)], [fd]))
    finally:
        os.close(fd)


def test_regions_that_overlap(c):
    c.handshake()
    fd = os.memfd_create("guest")
    os.ftruncate(fd, p.MEMORY)
    try:
        refused(c.table([(p.GUEST, p.MEMORY, p.USER, 0), (p.GUEST + 4096, p.MEMORY, p.USER + (1 << 30), 0)], [fd, fd]))
    finally:
        os.close(fd)


def test_a_region_past_the_end_of_the_address_space(c):
    c.handshake()
    fd = os.memfd_create("guest")
    os.ftruncate(fd, p.MEMORY)
    try:
        refused(c.table([(2**64 - 4096, p.MEMORY, p.USER, 0)], [fd]))
    finally:
        os.close(fd)


def test_an_ack_of_features_never_offered(c):
    c.handshake()
    bit = next(b for b in range(63, 0, -1) if not c.offered >> b & 1)
    refused(c.u64(p.SET_FEATURES, c.offered | 1 << bit))


def test_a_queue_that_is_not_there(c):
    c.handshake()
    c.memory()
    refused(c.order(p.SET_VRING_NUM, struct.pack("<II", 200, 16)))


@pytest.mark.parametrize("size", (0, 3, 65535))
def test_a_ring_of_descriptors(c, size):
    c.handshake()
    c.memory()
    refused(c.order(p.SET_VRING_NUM, struct.pack("<II", 0, size)))


def test_a_ring_of_a_vmm_that_offers_its_largest(c, served):
    """crosvm offers 32,768 descriptors if it is not told otherwise; the log has the remedy."""
    c.handshake()
    c.memory()
    refused(c.order(p.SET_VRING_NUM, struct.pack("<II", 0, 32768)))
    wanted = ("cannot have 32768 descriptors", "crosvm: max-queue-size")
    r.wait_for("the log has the remedy", lambda: all(text in served.daemon.child.output() for text in wanted))


def test_a_ring_outside_of_memory(c):
    c.handshake()
    c.memory()
    c.order(p.SET_VRING_NUM, struct.pack("<II", 0, 16))
    answers = [c.addresses(0, desc=0xDEAD_0000, used=0xDEAD_1000, avail=0xDEAD_2000)]
    if answers[0] == p.ACCEPTED:
        c.eventfd(p.SET_VRING_CALL, 0)
        fd = os.eventfd(0)
        c.fds.append(fd)
        answers.append(c.order(p.SET_VRING_KICK, struct.pack("<Q", 0), [fd]))
        answers.append(c.order(p.SET_VRING_ENABLE, struct.pack("<II", 0, 1)))
        os.eventfd_write(fd, 1)
    r.require(p.REFUSED in answers, f"a ring outside of memory was accepted: {answers}")


def test_a_ring_over_the_edge_of_memory(c):
    c.handshake()
    c.memory()
    c.order(p.SET_VRING_NUM, struct.pack("<II", 0, 1024))
    answers = [c.addresses(0, desc=p.USER + p.MEMORY - 4096)]
    if answers[0] == p.ACCEPTED:
        c.eventfd(p.SET_VRING_CALL, 0)
        fd = os.eventfd(0)
        c.fds.append(fd)
        answers.append(c.order(p.SET_VRING_KICK, struct.pack("<Q", 0), [fd]))
        answers.append(c.order(p.SET_VRING_ENABLE, struct.pack("<II", 0, 1)))
    r.require(p.REFUSED in answers, f"a ring over the edge of memory was accepted: {answers}")


def request(c, prepare, done=True):
    """A read of one sector that `prepare` spoils; its status."""
    c.handshake()
    c.memory()
    kick, _ = c.ring()
    c.describe_read()
    head = prepare(c)
    c.offer(head or 0, kick)
    if done:
        r.wait_for("the request is answered", lambda: c.used() == 1)
    else:
        time.sleep(0.2)
    return c.ram[p.DATA + 8192]


def header(kind, sector):
    """A request's header is put into the memory."""

    def prepare(c):
        c.ram[p.DATA : p.DATA + 16] = struct.pack("<IIQ", kind, 0, sector)

    return prepare


ANY_ERROR = (1, 2, 0xFF)


@pytest.mark.parametrize("prepare, statuses", (
    pytest.param(lambda c: c.describe(1, 0x1000, 512, 3, 2), ANY_ERROR, id="data outside of memory"),
    pytest.param(lambda c: c.describe(1, 2**64 - 256, 512, 3, 2), ANY_ERROR, id="data that wraps around the address space"),
    pytest.param(lambda c: c.describe(2, p.GUEST + p.DATA + 8192, 1, 3, 1), ANY_ERROR, id="a descriptor loop"),
    pytest.param(lambda c: c.describe(1, p.GUEST + p.DATA, 512, 4, 0), ANY_ERROR, id="an indirect table that was not agreed on"),
    pytest.param(lambda c: c.describe(0, p.GUEST + p.DATA, 3, 1, 1), ANY_ERROR, id="a header of 3 bytes"),
    pytest.param(header(0, 1 << 40), (1,), id="a read past the end"),
    pytest.param(header(0, 2**64 - 1), (1,), id="a read at the last sector there can be"),
    pytest.param(header(77, 0), (2,), id="a request type that is not there"),
    pytest.param(lambda c: c.describe(1, p.GUEST + p.DATA + 4096, 100, 3, 2), (1,), id="data of 100 bytes"),
))  # fmt: skip
def test_a_request_ends_with_an_error(c, prepare, statuses):
    status = request(c, prepare)
    r.require(status in statuses, f"it ended with status {status}")


def test_a_chain_head_outside_of_the_ring(c):
    request(c, lambda _: 999, done=False)


def test_an_available_index_far_ahead(c):
    c.handshake()
    c.memory()
    kick, _ = c.ring()
    c.offer(0, kick, index=1000)
    time.sleep(0.2)


def test_memory_taken_away_under_a_running_ring(c):
    c.handshake()
    c.memory()
    kick, _ = c.ring()
    c.table([], [])
    try:
        os.eventfd_write(kick, 1)
    except OSError:
        pass
    time.sleep(0.1)


def test_the_file_of_guest_memory_cut_short_under_a_running_ring(c):
    c.handshake()
    c.memory()
    kick, _ = c.ring()
    c.ram.close()  # an access to it would now end this process
    os.ftruncate(c.fds[0], 0)
    try:
        os.eventfd_write(kick, 1)
    except OSError:
        pass
    time.sleep(0.2)


def test_half_a_header_then_silence(c, served):
    c.send(struct.pack("<II", p.GET_FEATURES, p.VERSION))
    time.sleep(1.0)
    # The control socket is served meanwhile.
    served.daemon.status()


def test_half_a_payload_then_the_end(c):
    c.message(p.SET_FEATURES, b"\0\0", size=8)
    time.sleep(0.3)


def test_three_bytes_then_the_end(c):
    c.send(b"\1\0\0")


def test_another_exports_verified_load_was_unharmed(served):
    served.unharmed()

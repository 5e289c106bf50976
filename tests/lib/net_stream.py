"""Two programs that stream bytes to each other in both directions, and check each byte.

They are `listen PORT` and `talk HOST PORT STREAMS STOPFILE`. `talk` sends until STOPFILE exists.
Then both sides receive the rest. This file is a program, so that it can run in another network
namespace.
"""

import os
import socket
import sys
import threading

# A prime: a piece that is missing, doubled or moved shows.
PERIOD = 65_521
CHUNK = 1 << 16
PATTERN = bytes((k * k // 7 + k) & 0xFF for k in range(PERIOD)) * 3
# A flow may wait for a retransmission that comes late.
QUIET_S = 60


def talk(sock, until):
    at = 0
    while not until():
        at += sock.send(PATTERN[at % PERIOD :][:CHUNK])
    sock.shutdown(socket.SHUT_WR)


def hear(sock):
    """Bytes heard; wrong ones end the program."""
    at = 0
    while data := sock.recv(CHUNK):
        if PATTERN[at % PERIOD :][: len(data)] != data:
            print(f"wrong bytes at {at}", flush=True)
            os._exit(1)
        at += len(data)
    return at


def both(sock, until):
    """Talks until then, and hears what the other has to say."""
    sock.settimeout(QUIET_S)
    ended = threading.Event()
    talker = threading.Thread(target=talk, args=(sock, lambda: until() or ended.is_set()))
    talker.start()
    heard = hear(sock)
    ended.set()
    talker.join()
    return heard


def listen(port):
    server = socket.create_server(("", port))
    print("listening", flush=True)
    while True:
        sock, _ = server.accept()

        def serve(sock=sock):
            # As long as the other one talks.
            both(sock, lambda: False)
            sock.close()

        threading.Thread(target=serve, daemon=True).start()


def connect(host, port, streams, stop_file):
    total = []

    def one():
        sock = socket.create_connection((host, port), timeout=QUIET_S)
        total.append(both(sock, lambda: os.path.exists(stop_file)))

    threads = [threading.Thread(target=one) for _ in range(streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if len(total) != streams:
        sys.exit(f"{streams - len(total)} streams failed")
    print(f"heard {sum(total)}", flush=True)


if __name__ == "__main__":
    # A thread that fails ends the program.
    threading.excepthook = lambda args: (sys.__excepthook__(args.exc_type, args.exc_value, args.exc_traceback), os._exit(1))
    if sys.argv[1] == "listen":
        listen(int(sys.argv[2]))
    else:
        connect(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])

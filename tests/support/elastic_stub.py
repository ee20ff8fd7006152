"""Stand for a rank under an agent of torchrun: ask the test to fork the rank, and end as it ends. It needs no torch."""

import json
import os
import signal
import socket
import sys


def main() -> None:
    with socket.socket(socket.AF_UNIX) as test:
        test.connect(sys.argv[1])
        signal.signal(signal.SIGTERM, lambda *_: test.sendall(b"end\n"))
        test.sendall(json.dumps([os.getppid(), dict(os.environ), sys.argv[2:]]).encode() + b"\n")
        status = int(test.makefile().readline() or 1)
    if status < 0:
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)


if __name__ == "__main__":
    main()

"""Starts a program as a shell does in the foreground: `foreground.py [--terminal] program arguments`.

What a shell runs in the background ignores Ctrl-C, and what nohup runs ignores SIGHUP; this program does not.
With `--terminal`, its standard input becomes its controlling terminal.
"""

import fcntl
import os
import signal
import sys
import termios

argv = sys.argv[1:]
if argv[0] == "--terminal":
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    argv = argv[1:]
signal.signal(signal.SIGINT, signal.SIG_DFL)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
os.execv(argv[0], argv)

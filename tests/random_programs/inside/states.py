"""Hold what a process is rather than has: signals, timers, threads, limits, credentials, working directory, children."""

from __future__ import annotations

import ctypes
import os
import resource
import select
import signal
import struct
import threading
import time

from base import LIBC, Holding, call, same, syscall

PR_SET_PDEATHSIG, PR_GET_PDEATHSIG, PR_SET_NAME, PR_SET_DUMPABLE, PR_GET_DUMPABLE = 1, 2, 15, 4, 3
PR_SET_SUBREAPER, PR_GET_SUBREAPER, PR_SET_NNP, PR_GET_NNP, PR_SET_SLACK, PR_GET_SLACK = 36, 37, 38, 39, 29, 30
PR_SET_THP, PR_GET_THP, PR_SET_SECCOMP = 41, 42, 22
CLONE_FS, CLONE_FILES = 0x200, 0x400
SYS_CLONE, SYS_IOPRIO_SET, SYS_IOPRIO_GET, SYS_QUEUE, SYS_TIMER_CREATE, SYS_TIMER_SET, SYS_TIMER_GET = (
    *(56, 251, 252, 129, 222, 223, 224),
)


HARMLESS = [signal.SIGURG, signal.SIGCHLD, signal.SIGPIPE, signal.SIGWINCH]
SENT = [signal.SIGUSR1, signal.SIGUSR2, *range(signal.SIGRTMIN, signal.SIGRTMAX + 1)]


def get_int(option: int) -> int:
    found = ctypes.c_int()
    call("prctl", option, ctypes.byref(found), 0, 0, 0)
    return found.value


class Zombie(Holding):
    """Children that ended and were not waited for."""

    def build(self) -> None:
        self.children = []
        for code in self.rng.sample([0, 3, -signal.SIGKILL, -signal.SIGTERM], 2):
            pid = os.fork()
            if pid == 0:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                signal.pthread_sigmask(signal.SIG_SETMASK, set())
                if code < 0:
                    os.kill(os.getpid(), -code)
                    signal.pause()
                os._exit(code)
            self.children.append((pid, code))
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)

    def use(self) -> None:
        for pid, code in self.children:
            same(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), code, "how a child had ended")


class Threads(Holding):
    """Threads that wait in different system calls, with names and masks of their own."""

    def build(self) -> None:
        self.go, self.results = threading.Event(), {}
        self.pipe = os.pipe()
        waits = self.rng.sample(["event", "read", "sleep", "poll"], self.rng.randint(1, 4))
        self.threads = []
        for wait in waits:
            thread = threading.Thread(target=self.run, args=(wait, self.rng.choice(HARMLESS)), daemon=True)
            self.threads.append(thread)
            thread.start()
        while len(self.results) < len(waits):
            time.sleep(0.001)

    def run(self, wait: str, blocked: int) -> None:
        # What other kinds of state send is for the first thread: one that does not block it would be ended by it.
        signal.pthread_sigmask(signal.SIG_BLOCK, {blocked, *SENT})
        LIBC.prctl(PR_SET_NAME, f"w-{wait}".encode(), 0, 0, 0)
        self.results[wait] = ""
        if wait == "event":
            self.go.wait()
        elif wait == "read":
            os.read(self.pipe[0], 1)
        elif wait == "sleep":
            self.go.wait(3600)  # with a time-out, so another system call than `event`
        else:
            select.select([self.pipe[0]], [], [], 3600)
        self.results[wait] = "done"

    def use(self) -> None:
        self.go.set()
        os.write(self.pipe[1], b"xx")

    def check(self) -> None:
        for thread in self.threads:
            thread.join(10)
        same(set(self.results.values()), {"done"}, "threads that went on")


class PendingSignals(Holding):
    """Signals that are blocked and pending, some queued with a value, some for a thread."""

    def build(self) -> None:
        self.signals = [signal.SIGUSR1, signal.SIGRTMIN + 5, signal.SIGRTMIN + 5, signal.SIGUSR2]
        signal.pthread_sigmask(signal.SIG_BLOCK, self.signals)
        os.kill(os.getpid(), signal.SIGUSR1)
        for value in (11, 12):  # si_signo, si_errno, si_code = SI_QUEUE, padding, pid, uid, value
            info = struct.pack("iiiiiiq", signal.SIGRTMIN + 5, 0, -1, 0, os.getpid(), 0, value).ljust(128, b"\0")
            syscall(SYS_QUEUE, os.getpid(), signal.SIGRTMIN + 5, ctypes.create_string_buffer(info, 128))
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR2)

    def report(self) -> object:
        return sorted(signal.sigpending())

    def use(self) -> None:
        got = [signal.sigtimedwait(self.signals, 1) for _ in self.signals]
        same(sorted(one.si_signo for one in got if one), sorted(self.signals), "pending signals")
        same(signal.sigtimedwait(self.signals, 0), None, "no signal comes twice")


class Handlers(Holding):
    def build(self) -> None:
        self.seen: list[int] = []
        self.signal = signal.SIGRTMIN + 7
        signal.signal(self.signal, lambda number, _: self.seen.append(number))
        signal.signal(signal.SIGURG, signal.SIG_IGN)
        signal.siginterrupt(self.signal, self.rng.choice([True, False]))

    def use(self) -> None:
        os.kill(os.getpid(), self.signal)

    def check(self) -> None:
        if os.getpid() == self.owner:
            same(self.seen, [self.signal], "signals handled")


class AlternateStack(Holding):
    def build(self) -> None:
        self.memory = ctypes.create_string_buffer(1 << 16)
        stack = struct.pack("PixxxxN", ctypes.addressof(self.memory), 0, 1 << 16)
        syscall(131, ctypes.create_string_buffer(stack, len(stack)), None)

    def report(self) -> object:
        found = ctypes.create_string_buffer(24)
        syscall(131, None, found)
        return struct.unpack("PixxxxN", found.raw)


class Itimer(Holding):
    def build(self) -> None:
        self.which = self.rng.choice([signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF])
        self.seen: list[int] = []
        self.signal = {0: signal.SIGALRM, 1: signal.SIGVTALRM, 2: signal.SIGPROF}[self.which]
        signal.signal(self.signal, lambda number, _: self.seen.append(number))
        signal.setitimer(self.which, 3000, 40)

    def report(self) -> object:
        left, interval = signal.getitimer(self.which)
        return [2000 < left <= 3001, interval]

    def use(self) -> None:
        signal.setitimer(self.which, 0.001, 0)

    def check(self) -> None:
        end = time.monotonic() + 10
        while not self.seen and time.monotonic() < end:
            pass  # two of the three clocks count only work
        same(self.seen, [self.signal], "the timer fired")


class PosixTimer(Holding):
    def build(self) -> None:
        event = struct.pack("Pii48x", 77, signal.SIGRTMIN + 9, 0)
        found = ctypes.c_int()
        syscall(SYS_TIMER_CREATE, self.rng.choice([0, 1]), ctypes.create_string_buffer(event, 64), ctypes.byref(found))
        self.timer = found.value
        signal.signal(signal.SIGRTMIN + 9, lambda *_: self.seen.append(1))
        self.seen: list[int] = []
        self.set(3000 * self.rng.choice([0, 1]), 0)

    def set(self, seconds: int, nanoseconds: int) -> None:
        value = struct.pack("qqqq", 9, 0, seconds, nanoseconds)
        syscall(SYS_TIMER_SET, self.timer, 0, ctypes.create_string_buffer(value, 32), None)

    def report(self) -> object:
        found = ctypes.create_string_buffer(32)
        syscall(SYS_TIMER_GET, self.timer, found)
        interval, _, left, _ = struct.unpack("qqqq", found.raw)
        return [interval, left > 2000]

    def use(self) -> None:
        self.set(0, 1_000_000)

    def check(self) -> None:
        end = time.monotonic() + 10
        while not self.seen and time.monotonic() < end:
            time.sleep(0.01)
        same(bool(self.seen), True, "the timer fired")


class Scheduling(Holding):
    def build(self) -> None:
        os.nice(self.rng.randrange(1, 15))
        os.sched_setscheduler(0, self.rng.choice([os.SCHED_OTHER, os.SCHED_BATCH]), os.sched_param(0))
        os.sched_setaffinity(0, {self.rng.choice(sorted(os.sched_getaffinity(0)))})

    def report(self) -> object:
        return [os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0), sorted(os.sched_getaffinity(0))]


class IoPriority(Holding):
    def build(self) -> None:
        syscall(SYS_IOPRIO_SET, 1, 0, 2 << 13 | self.rng.randrange(8))

    def report(self) -> object:
        return syscall(SYS_IOPRIO_GET, 1, 0)


class TimerSlack(Holding):
    def build(self) -> None:
        call("prctl", PR_SET_SLACK, 777_000, 0, 0, 0)

    def report(self) -> object:
        return LIBC.prctl(PR_GET_SLACK, 0, 0, 0, 0)


class Controls(Holding):
    """What prctl sets and CRIU carries."""

    def build(self) -> None:
        call("prctl", PR_SET_NAME, f"rand {self.rng.randrange(99)} (x)".encode(), 0, 0, 0)
        call("prctl", PR_SET_PDEATHSIG, signal.SIGURG, 0, 0, 0)
        call("prctl", PR_SET_SUBREAPER, self.rng.choice([0, 1]), 0, 0, 0)
        call("prctl", PR_SET_THP, self.rng.choice([0, 1]), 0, 0, 0)
        if self.rng.random() < 0.5:
            call("prctl", PR_SET_NNP, 1, 0, 0, 0)

    def report(self) -> object:
        numbers = [get_int(PR_GET_PDEATHSIG), get_int(PR_GET_SUBREAPER)]
        with open("/proc/self/comm") as comm:
            return [comm.read(), numbers, LIBC.prctl(PR_GET_NNP, 0, 0, 0, 0), LIBC.prctl(PR_GET_THP, 0, 0, 0, 0)]


class Undumpable(Holding):
    """A process that may not be traced by others of its user, as ssh-agent makes itself."""

    def build(self) -> None:
        call("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)

    def report(self) -> object:
        return LIBC.prctl(PR_GET_DUMPABLE, 0, 0, 0, 0)


class Limits(Holding):
    def build(self) -> None:
        resource.setrlimit(resource.RLIMIT_CORE, (self.rng.randrange(9), resource.getrlimit(resource.RLIMIT_CORE)[1]))
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, self.rng.randrange(1500, 4000)), hard))

    def report(self) -> object:
        return [resource.getrlimit(resource.RLIMIT_CORE), resource.getrlimit(resource.RLIMIT_NOFILE)]


class Place(Holding):
    """umask and working directory."""

    def build(self) -> None:
        os.umask(self.rng.choice([0, 0o27, 0o77]))
        where = self.path("cwd")
        os.mkdir(where)
        os.chdir(self.rng.choice([where, "/", "/dev/shm", "/usr/share"]))

    def report(self) -> object:
        mask = os.umask(0)
        os.umask(mask)
        return [mask, os.readlink("/proc/self/cwd")]


class DeletedCwd(Holding):
    def build(self) -> None:
        os.mkdir(self.path("cwd"))
        os.chdir(self.path("cwd"))
        os.rmdir(self.path("cwd"))

    def report(self) -> object:
        return os.readlink("/proc/self/cwd").rpartition("/")[2]


class Chroot(Holding):
    """A child with a root directory of its own."""

    def build(self) -> None:
        os.makedirs(self.path("root") + "/in")
        out, into = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.chroot(self.path("root"))
            os.chdir("/in")
            os.write(into, b"x")
            while True:
                signal.pause()
        os.read(out, 1)
        os.close(out)
        os.close(into)

    def report(self) -> object:
        return [os.readlink(f"/proc/{self.pid}/{one}") for one in ("root", "cwd")]


class Seccomp(Holding):
    """A filter that answers one system call with an error: it must hold after the restore."""

    def build(self) -> None:
        call("prctl", PR_SET_NNP, 1, 0, 0, 0)
        refuse = 0x00050000 | 99  # SECCOMP_RET_ERRNO
        program = [(0x20, 0, 0, 0), (0x15, 0, 1, 425), (0x06, 0, 0, refuse), (0x06, 0, 0, 0x7FFF0000)]
        code = b"".join(struct.pack("HBBI", *one) for one in program)
        self.code = ctypes.create_string_buffer(code, len(code))
        head = struct.pack("HxxxxxxP", len(program), ctypes.addressof(self.code))
        call("prctl", PR_SET_SECCOMP, 2, ctypes.create_string_buffer(head, len(head)), 0, 0)

    def report(self) -> object:
        found = LIBC.syscall(425, 1, None)
        return [found, ctypes.get_errno()]


class Capabilities(Holding):
    """Drop one capability from the bounding set."""

    def build(self) -> None:
        call("prctl", 24, self.rng.choice([5, 14, 22]), 0, 0, 0)

    def report(self) -> object:
        with open("/proc/self/status") as status:
            return [line for line in status if line.startswith("Cap")]


class Daemon(Holding):
    """A process in a session of its own, whose parent ended: the session's first process is its parent now."""

    def build(self) -> None:
        out, into = os.pipe()
        child = os.fork()
        if child == 0:
            if os.fork() == 0:
                os.setsid()
                os.write(into, str(os.getpid()).encode())
                while True:
                    signal.pause()
            os._exit(0)
        os.waitpid(child, 0)
        self.pid = int(os.read(out, 20))
        os.close(out)
        os.close(into)

    def report(self) -> object:
        return [self.pid, os.getsid(self.pid)]


class _Clone(Holding):
    flags = 0

    def build(self) -> None:
        self.pid = syscall(SYS_CLONE, self.flags | signal.SIGCHLD, 0, 0, 0, 0)
        if self.pid == 0:
            while True:
                signal.pause()

    def report(self) -> object:
        return self.pid


class SharesFiles(_Clone):
    """A process with the same descriptor table (CLONE_FILES)."""

    flags = CLONE_FILES

    def check(self) -> None:
        fd = os.open("/dev/null", os.O_RDONLY)
        same(os.path.exists(f"/proc/{self.pid}/fd/{fd}"), True, "a new descriptor is seen by who shares the table")


class SharesPlace(_Clone):
    """A process with the same working directory and umask (CLONE_FS)."""

    flags = CLONE_FS

    def check(self) -> None:
        before = os.open(".", os.O_RDONLY)
        os.chdir("/")
        same(os.readlink(f"/proc/{self.pid}/cwd"), "/", "the working directory of who shares it")
        os.fchdir(before)


class Sleeper(Holding):
    """Another program: not Python, started by exec."""

    def build(self) -> None:
        program = self.rng.choice(["/bin/sleep", "/usr/bin/sleep"])
        self.pid = os.posix_spawn(program, ["sleep", "3000"], dict(os.environ))

    def report(self) -> object:
        return self.pid

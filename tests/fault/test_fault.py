#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Ranks that die, stop or disagree, and files that are broken: a named error in time, exit 1, and nothing left behind.
Usage: test_fault.py PATH/TO/dcp-attn [unittest options]"""
import fcntl, os, random, shutil, signal, struct, subprocess, sys, tempfile, termios, threading, time, unittest, uuid

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
GOLDEN = os.path.join(ROOT, "tests", "golden")
EXE = os.path.abspath(sys.argv.pop(1)) if len(sys.argv) > 1 else os.path.join(ROOT, "build", "dcp-attn")
CACHE = os.environ.get("DCP_ATTN_CACHE") or os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "dcp-attn")
MODEL = os.path.join(CACHE, "models", "smollm2-135m.gguf")
# What an MPI library keeps there is its own business, and other jobs of this host may run.
MPI_OWN = ("vader_segment", "mpich", "sem.mpich", "ucx", "psm")
FOUR = sorted(os.path.join(GOLDEN, "merge", "seven-ranks-96-heads", f) for f in os.listdir(os.path.join(GOLDEN, "merge", "seven-ranks-96-heads")) if f.startswith("rank"))


def marked(mark):
    """Processes that carry the mark in their environment."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/environ", "rb") as f:
                if mark.encode() in f.read():
                    with open(f"/proc/{pid}/stat") as s:
                        if s.read().rsplit(")", 1)[1].split()[0] != "Z":
                            found.append(int(pid))
        except OSError:
            pass
    return found


class Awake(threading.Thread):
    """A clock as the ranks have one: a time in which everything slept (Ctrl-Z, a suspended machine) counts as half a second."""

    def __init__(self):
        super().__init__(daemon=True)
        self.seconds = 0.0
        self.start()

    def run(self):
        last = time.monotonic()
        while True:
            time.sleep(0.05)
            now = time.monotonic()
            self.seconds += min(now - last, 0.5)
            last = now


AWAKE = Awake()


class Faults(unittest.TestCase):
    def setUp(self):
        self.dir = tempfile.mkdtemp()
        self.mark = "MARK=" + uuid.uuid4().hex
        self.shm = set(os.listdir("/dev/shm"))

    def tearDown(self):
        for pid in marked(self.mark):
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.dir)

    def environment(self, fault=None):
        env = {k: v for k, v in os.environ.items() if not k.startswith("DCP_ATTN_") or k == "DCP_ATTN_CACHE"}
        env["DCP_ATTN_TEST_" + self.mark.split("=")[0]] = self.mark.split("=")[1]
        if fault:
            env["DCP_ATTN_FAULT"] = fault
        return env

    def nothing_left(self, within=5.0):
        end = AWAKE.seconds + within
        while marked(self.mark) and AWAKE.seconds < end:
            time.sleep(0.05)
        self.assertEqual(marked(self.mark), [], "processes are left")
        left = {f for f in set(os.listdir("/dev/shm")) - self.shm if not f.startswith(MPI_OWN)}
        self.assertEqual(left, set(), "something is left in /dev/shm")

    def struck(self, fault, args, limit_s, *words):
        begin = AWAKE.seconds
        p = subprocess.run([EXE, *args], capture_output=True, text=True, env=self.environment(fault), timeout=120)
        took = AWAKE.seconds - begin
        self.assertEqual(p.returncode, 1, f"{fault}: stdout {p.stdout[-300:]!r} stderr {p.stderr[-600:]!r}")
        for w in words:
            self.assertIn(w, p.stderr, fault)
        self.assertLess(took, limit_s, f"{fault} took {took:.1f} s: {p.stderr[-400:]}")
        self.nothing_left()

    def merge_args(self, *more):
        return ["merge", "--lse-base", "e", "-o", os.path.join(self.dir, "o"), *more, *FOUR]

    def generate_args(self, *more):
        if not os.path.exists(MODEL):
            self.skipTest(f"no {MODEL}; scripts/fetch-model.sh smollm2-135m fetches it")
        return ["generate", "-m", MODEL, "-p", "Count to one hundred.", "--max-tokens", "40", *more]

    def test_merge_killed(self):
        for point in ("allgather", "merge"):
            for rank in (0, 3, 6):
                self.struck(f"kill:{point}:{rank}", self.merge_args(), 20, f"rank {rank}")
                self.assertEqual(os.listdir(self.dir), [], "a result was written")

    def test_killed_while_writing(self):
        """A FIFO that takes little holds a run at its end; one of a file dies with all of it written but the name."""
        fifo = os.path.join(self.dir, "fifo")
        os.mkfifo(fifo)
        reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
        args = self.merge_args()
        args[args.index("-o") + 1] = fifo
        p = self.start(args)
        end = AWAKE.seconds + 20
        while p.poll() is None and AWAKE.seconds < end and struct.unpack("i", fcntl.ioctl(reader, termios.FIONREAD, b"\0" * 4))[0] == 0:
            time.sleep(0.02)
        p.kill()
        p.wait()
        p.stdout.close()
        os.close(reader)
        self.nothing_left()
        # The ranks gather the result after the merge: by then rank 0 has the file open.
        self.struck("kill:gather_cols:1", self.merge_args(), 20, "rank 1")
        self.struck("kill:gather_cols:0", self.merge_args(), 20, "rank 0")
        self.assertEqual(os.listdir(self.dir), ["fifo"])

    def test_logits_path(self):
        p = subprocess.run([EXE, *self.generate_args("--logits", os.path.join(self.dir, "no", "such"))], capture_output=True, text=True,
                           env=self.environment(), timeout=120)
        self.assertEqual((p.returncode, p.stdout.strip()), (1, ""), "the answer came before the file was tried")
        self.assertIn("No such file", p.stderr)

    def test_merge_exits(self):
        self.struck("exit:merge:2", self.merge_args("--algo", "alltoall"), 20, "rank 2")

    def test_merge_stopped(self):
        for algo in ("direct", "alltoall"):
            self.struck("stop:merge:2", self.merge_args("--deadline", "2", "--algo", algo), 12, "rank 2")

    def test_merge_late(self):
        self.struck("delay:merge:1", self.merge_args("--deadline", "1"), 15, "rank 1")

    def test_generate_killed(self):
        for point in ("start", "prompt", "merge", "token"):
            self.struck(f"kill:{point}:2", self.generate_args("-n", "4"), 40, "rank 2")

    def test_generate_killed_late(self):
        self.struck("kill:merge:1:200", self.generate_args("-n", "3"), 40, "rank 1")
        self.struck("kill:token:0:5", self.generate_args("-n", "3"), 40, "rank 0")

    def test_generate_stopped(self):
        self.struck("stop:token:1:3", self.generate_args("-n", "3", "--deadline", "3"), 40, "rank 1")

    def test_threads_late(self):
        self.struck("delay:merge:1", self.merge_args("--deadline", "1", "--comm", "threads"), 15, "rank 1")

    def start(self, args):
        return subprocess.Popen([EXE, *args], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=self.environment())

    def generating(self, n):
        """A run in the middle of its answer."""
        args = self.generate_args("-n", str(n))
        args[args.index("40")] = "2000"
        p = self.start(args)
        self.assertNotEqual(p.stdout.read(1), b"")
        self.assertGreaterEqual(len(marked(self.mark)), n)
        return p

    def test_parent_killed(self):
        p = self.generating(4)
        p.kill()
        p.wait()
        p.stdout.close()
        self.nothing_left()

    def test_parent_interrupted(self):
        for sig in (signal.SIGINT, signal.SIGTERM):
            p = self.generating(3)
            p.send_signal(sig)
            self.assertNotEqual(p.wait(timeout=20), 0)
            p.stdout.close()
            self.nothing_left()

    def test_rank_killed_from_outside(self):
        p = self.generating(4)
        children = [pid for pid in marked(self.mark) if pid != p.pid]
        os.kill(children[-1], signal.SIGKILL)
        self.assertEqual(p.wait(timeout=40), 1)
        p.stdout.close()
        self.nothing_left()

    def test_reader_goes_away(self):
        p = self.generating(2)
        p.stdout.close()
        self.assertEqual(p.wait(timeout=40), 1)
        self.nothing_left()

    def test_reader_that_does_not_read(self):
        """A pager that waits, a stopped terminal: the ranks do not wait for it with their deadline running."""
        r, w = os.pipe()
        fcntl.fcntl(w, fcntl.F_SETPIPE_SZ if hasattr(fcntl, "F_SETPIPE_SZ") else 1031, 4096)
        os.write(w, b"x" * 4096)
        p = subprocess.Popen([EXE, *self.generate_args("-n", "2", "--deadline", "3")], stdout=w, stderr=subprocess.DEVNULL, env=self.environment())
        os.close(w)
        time.sleep(7)
        with os.fdopen(r, "rb") as f:
            text = f.read()
        self.assertEqual(p.wait(timeout=40), 0)
        self.assertGreater(len(text), 4096 + 10)
        self.nothing_left()

    def test_whole_run_paused(self):
        """Ctrl-Z and fg: the time in which all slept is no rank's fault."""
        args = self.generate_args("-n", "3", "--deadline", "3")
        args[args.index("40")] = "200"
        p = subprocess.Popen([EXE, *args], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=self.environment(), start_new_session=True)
        self.assertNotEqual(p.stdout.read(1), b"")
        os.killpg(p.pid, signal.SIGSTOP)
        time.sleep(7)
        os.killpg(p.pid, signal.SIGCONT)
        p.stdout.read()
        p.stdout.close()
        self.assertEqual(p.wait(timeout=60), 0)
        self.nothing_left()

    def test_late_and_paused(self):
        """A pause is no rank's fault, and saves none that is late: the rest of its delay comes after it."""
        for comm in ("threads", "shm"):
            p = subprocess.Popen([EXE, *self.merge_args("--deadline", "1", "--comm", comm)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
                                 env=self.environment("delay:merge:1"), start_new_session=True)
            time.sleep(0.6)
            os.killpg(p.pid, signal.SIGSTOP)
            time.sleep(3)
            os.killpg(p.pid, signal.SIGCONT)
            text = p.communicate(timeout=60)[1]
            self.assertEqual(p.returncode, 1, text)
            self.assertIn("rank 1", text)
            self.nothing_left()

    def test_another_shape(self):
        other = os.path.join(GOLDEN, "merge", "odd-dims", "rank0.safetensors")
        self.struck(None, ["merge", "--lse-base", "e", "-o", os.path.join(self.dir, "o"), *FOUR[:3], other], 20, "odd-dims", FOUR[0][-20:])

    def mpirun(self, *pieces, fault=None, wire=False):
        if not shutil.which("mpirun.openmpi"):
            self.skipTest("no mpirun.openmpi")
        command = ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe"]
        env = self.environment(fault)
        if wire:
            env["DCP_ATTN_MPI_SHARED"] = "0"  # as between hosts
        return subprocess.run(command + list(pieces), capture_output=True, text=True, env=env, timeout=120)

    def mpi_struck(self, fault, n, args, limit_s, *words):
        """Under mpirun, with memory that the ranks share and with none: an end in time, named, and nothing left."""
        for wire in (True, False):
            begin = AWAKE.seconds
            p = self.mpirun("-n", str(n), EXE, *args, fault=fault, wire=wire)
            took = AWAKE.seconds - begin
            where = f"{fault} {'wire' if wire else 'shared'}: {p.stderr[-600:]}"
            self.assertNotEqual(p.returncode, 0, where)
            self.assertLess(took, limit_s, where)
            for w in words:
                self.assertRegex(p.stderr, w, where)
            self.assertFalse(os.path.exists(os.path.join(self.dir, "o")), "a result was written")
            self.nothing_left()

    def three(self, *more):
        folder = os.path.join(GOLDEN, "merge", "no-cut")
        files = sorted(os.path.join(folder, f) for f in os.listdir(folder) if f.startswith("rank"))
        return ["merge", "--lse-base", "e", "-o", os.path.join(self.dir, "o"), *more, *files]

    def test_mpi_late(self):
        self.mpi_struck("delay:merge:1", 3, self.three("--algo", "alltoall", "--deadline", "2"), 30, r"ranks?:? .*\b1\b")

    def test_mpi_killed(self):
        # The launcher ends the job of a killed rank, and says which; the library has nothing to add.
        self.mpi_struck("kill:merge:1", 3, self.three("--algo", "alltoall", "--deadline", "5"), 30, "rank 1")

    def test_mpi_generate_killed(self):
        self.mpi_struck("kill:token:1:3", 3, self.generate_args("--deadline", "5"), 60, "rank 1")

    def test_mpi_bench_stopped(self):
        """In MPI's own all-reduce, which knows no deadline: the bench ends after one of the group's where it sees who is stopped, and names it; else after four."""
        for wire, deadline, who in ((False, "6", r"rank 1 \(pid \d+ is stopped\)"), (True, "2", r"\(MPI does not say which ranks\)")):
            args = ["bench", "merge", "--shape", "64,8,64", "--deadline", deadline]
            begin = AWAKE.seconds
            p = self.mpirun("-n", "3", EXE, *args, fault="stop:mpi_allreduce:1:5", wire=wire)
            self.assertLess(AWAKE.seconds - begin, 24, p.stderr)
            self.assertNotEqual(p.returncode, 0, p.stderr)
            self.assertRegex(p.stderr, r"MPI_Allreduce has not come back for [\d.]+ s; missing: .*" + who)
            self.nothing_left()

    def test_mpi_ranks_with_other_texts(self):
        one = self.generate_args()
        two = list(one)
        two[two.index("-p") + 1] = "Another text."
        p = self.mpirun("-n", "1", EXE, *one, ":", "-n", "1", EXE, *two)
        self.assertNotEqual(p.returncode, 0)
        self.assertIn("different texts", p.stderr)
        self.nothing_left()

    def test_mpi_world_is_not_n(self):
        p = self.mpirun("-n", "2", EXE, *self.generate_args("-n", "3"))
        self.assertNotEqual(p.returncode, 0)
        self.assertIn("3 ranks asked for in an MPI world of 2", p.stderr)
        self.nothing_left()


class BrokenModels(unittest.TestCase):
    def setUp(self):
        if not os.path.exists(MODEL):
            self.skipTest(f"no {MODEL}; scripts/fetch-model.sh smollm2-135m fetches it")
        self.dir = tempfile.mkdtemp()
        self.path = os.path.join(self.dir, "broken.gguf")
        self.size = os.path.getsize(MODEL)

    def tearDown(self):
        if hasattr(self, "dir"):
            shutil.rmtree(self.dir)

    def tokenize(self):
        return subprocess.run([EXE, "tokenize", "-m", self.path, "-p", "Hello"], capture_output=True, text=True, timeout=60)

    def test_truncated(self):
        with open(MODEL, "rb") as f:
            head = f.read(4 << 20)
        for n in (0, 1, 3, 4, 7, 8, 15, 16, 23, 24, 31, 64, 100, 1000, 65536, 1 << 20, 2 << 20):
            with open(self.path, "wb") as f:
                f.write(head[:n])
            p = self.tokenize()
            self.assertEqual(p.returncode, 1, f"{n} bytes: {p.stderr}")
            self.assertIn("broken.gguf", p.stderr)

    def test_truncated_tensors(self):
        shutil.copyfile(MODEL, self.path)
        os.truncate(self.path, self.size - 1)
        p = subprocess.run([EXE, "generate", "-m", self.path, "-p", "Hello", "-n", "2"], capture_output=True, text=True, timeout=60)
        self.assertEqual(p.returncode, 1, p.stderr)
        self.assertIn("broken.gguf", p.stderr)

    def test_corrupted(self):
        """Any byte of the head may be wrong: an error or a run, never a crash."""
        seed = 4711
        print(f"seed {seed}", file=sys.stderr)
        rng = random.Random(seed)
        shutil.copyfile(MODEL, self.path)
        with open(MODEL, "rb") as f:
            head = bytearray(f.read(1 << 20))
        places = list(range(0, 32)) + [rng.randrange(32, 4096) for _ in range(60)] + [rng.randrange(4096, len(head)) for _ in range(20)]
        with open(self.path, "r+b") as f:
            for at in places:
                for value in {head[at] ^ 0xFF, head[at] ^ (1 << rng.randrange(8))}:
                    f.seek(at)
                    f.write(bytes([value]))
                    f.flush()
                    p = self.tokenize()
                    self.assertIn(p.returncode, (0, 1), f"byte {at} = {value}: {p.returncode} {p.stderr[-300:]}")
                    if p.returncode == 1:
                        self.assertNotEqual(p.stderr, "")
                    f.seek(at)
                    f.write(bytes([head[at]]))
                    f.flush()

    def test_counts_from_hell(self):
        """Counts and lengths that no file can hold must not be believed."""
        shutil.copyfile(MODEL, self.path)
        with open(self.path, "r+b") as f:
            for at in (8, 16, 24):
                f.seek(at)
                good = f.read(8)
                for huge in (2**63 - 1, 2**64 - 1, 2**32, 2**40):
                    f.seek(at)
                    f.write(struct.pack("<Q", huge))
                    f.flush()
                    p = self.tokenize()
                    self.assertEqual(p.returncode, 1, f"{huge} at {at}: {p.stderr}")
                    self.assertIn("broken.gguf", p.stderr)
                f.seek(at)
                f.write(good)
                f.flush()


if __name__ == "__main__":
    unittest.main()

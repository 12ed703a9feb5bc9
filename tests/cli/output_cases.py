# SPDX-License-Identifier: Apache-2.0
"""Tests of what the command prints and what `make install` puts down; test_cli.py runs them."""
import json, os, re, shutil, subprocess, tempfile, unittest

from tensor_files import write

EXE = None  # set by test_cli.py
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
CACHE = os.environ.get("DCP_ATTN_CACHE") or os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "dcp-attn")
COMMANDS = ["generate", "perplexity", "tokenize", "merge", "attend", "bench merge", "bench attend", "bench extend", "bench product", "bench generate", "bench oom", "info"]
MPIRUNS = {"openmpi": ["mpirun.openmpi", "--oversubscribe", "-n", "2"], "mpich": ["mpirun.mpich", "-n", "2"]}


def environment(more=None):
    clean = {k: v for k, v in os.environ.items() if not k.startswith("DCP_ATTN_") or k == "DCP_ATTN_CACHE"}
    clean.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    clean.update(more or {})
    return clean


def run(*args, env=None, timeout=120, prefix=()):
    p = subprocess.run([*prefix, EXE, *args], capture_output=True, text=True, env=environment(env), timeout=timeout)
    return p.returncode, p.stdout, p.stderr


class Output(unittest.TestCase):
    def setUp(self):
        self.dir = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.dir)

    def path(self, name):
        return os.path.join(self.dir, name)

    def fits(self, text):
        for line in text.split("\n"):
            self.assertLessEqual(len(line), 80, line)

    def test_help_and_info_fit_80_columns(self):
        self.fits(run("--help")[1])
        self.fits(run("info")[1])
        for c in COMMANDS:
            self.fits(run(*c.split(), "--help")[1])

    def test_info_lists_kernels_in_columns(self):
        lines = run("info")[1].split("\nkernels\n")[1].splitlines()
        rows = [(k["family"], k["types"], k["name"]) for k in json.loads(run("info", "--json")[1])["kernels"]]
        at = [max(len(row[column]) for row in rows) + 2 for column in (0, 1)]
        self.assertEqual(lines, [f"  {family:{at[0]}}{types:{at[1]}}{name}" for family, types, name in rows])

    def test_info_asks_each_mpi_itself(self):
        found = {m["name"]: m["text"] for m in json.loads(run("info", "--json")[1])["groups"]["mpi"] if m["loads"]}
        if "openmpi" in found:
            self.assertIn("Open MPI", found["openmpi"])
        if "mpich" in found:
            self.assertIn("MPICH", found["mpich"])

    def test_higher_level_is_refused(self):
        best = json.loads(run("info", "--json")[1])["isa"]
        levels = ["scalar", "avx2", "avx512", "amx"]
        for level in levels[levels.index(best) + 1:]:
            for args in (["info"], ["attend", "-o", self.path("o"), "x"]):
                rc, out, err = run(*args, "--isa", level)
                self.assertEqual((rc, out), (2, ""))
                self.assertIn(f"--isa {level}: the highest level of this CPU is {best}", err)

    def test_place_in_the_source_is_for_developers(self):
        args = ("attend", "-o", self.path("o"), self.path("none"))
        for more in ((), ("-n", "2"), ("-n", "2", "--comm", "threads")):
            self.assertNotRegex(run(*args, *more)[2], r"\.c:\d+\]")
            self.assertRegex(run(*args, *more, env={"DCP_ATTN_DEBUG": "1"})[2], r"\.c:\d+\]")

    def test_attend_names_latent(self):
        write(self.path("in"), q=("F32", [1, 1, 4], [0.0] * 4), k=("F32", [2, 1, 4], [0.0] * 8))
        rc, _, err = run("attend", "-o", self.path("o"), self.path("in"))
        self.assertEqual(rc, 1)
        self.assertIn("'v'", err)
        self.assertIn("--latent D", err)
        rc, _, err = run("attend", "-o", self.path("o"), self.path("in"), "--latent", "2")
        self.assertEqual(rc, 0, err)
        self.assertIn("attended on 1 rank (", err)
        self.assertIn("rank 0: 2 keys, ", err)
        self.assertRegex(err, r"workspace [\d.]+ ([KM]i)?B a rank, 0 B moved")

    def test_texts_of_values(self):
        self.assertIn("-p: the text is empty", run("generate", "-m", "x", "-p", "")[2])
        self.assertIn("from 64K to ", run("attend", "--memory", "7", "-o", "x", "f")[2])

    def test_closed_pipe_is_quiet(self):
        for args in (["info"], ["info", "--json"], ["attend", "--help"]):
            reader, writer = os.pipe()
            os.close(reader)  # before the command starts, or a quick one may have written
            p = subprocess.run([EXE, *args], stdout=writer, stderr=subprocess.PIPE, env=environment(), timeout=60)
            os.close(writer)
            self.assertEqual((p.returncode, p.stderr), (1, b""))

    def test_full_disk_names_the_cause(self):
        if not os.path.exists("/dev/full"):
            self.skipTest("no /dev/full")
        for args in (["info"], ["info", "--json"], ["attend", "--help"]):
            with open("/dev/full", "w") as full:
                p = subprocess.run([EXE, *args], stdout=full, stderr=subprocess.PIPE, text=True, env=environment())
            self.assertEqual((p.returncode, p.stderr), (1, "dcp-attn: standard output: No space left on device\n"))

    def test_once_under_mpirun(self):
        for name, prefix in MPIRUNS.items():
            if not shutil.which(prefix[0]):
                continue
            rc, out, _ = run("info", prefix=prefix)
            self.assertEqual((rc, out.count("kernels\n")), (0, 1), name)
            _, _, err = run("generate", "--frob", prefix=prefix)
            self.assertEqual(err.count("no such option"), 1, name)
            _, out, _ = run("attend", "--help", prefix=prefix)
            self.assertEqual(out.count("Usage:"), 1, name)


class ModelOutput(unittest.TestCase):
    fits = Output.fits

    def setUp(self):
        self.model = os.path.join(CACHE, "models", "smollm2-135m.gguf")
        if not os.path.exists(self.model):
            self.skipTest(f"no {self.model}; scripts/fetch-model.sh smollm2-135m fetches it")

    def generate(self, *args):
        rc, out, err = run("generate", "-m", self.model, *args, timeout=300)
        self.assertEqual(rc, 0, err)
        return out, err

    def test_tables(self):
        for args in (("-n", "1"), ("-n", "3"), ("-n", "2", "--comm", "threads")):
            _, err = self.generate("-p", "Hello", "--max-tokens", "3", *args)
            self.fits(err)
            self.assertRegex(err, r"rank +attention +merge +gather +dense +other\n")
            self.assertRegex(err, r"rank +KV tokens +KV bytes +weights +workspace +activations +rest +peak RSS\n")
            self.assertIn("pages of 64 tokens", err)
            self.assertEqual("replicated on every rank" in err, args[1] != "1")
            self.assertRegex(err, r"moved between ranks: .* by the merge, .* by gathers")

    def test_memory_adds_up(self):
        for n, comm in ((1, "shm"), (2, "shm"), (2, "threads")):
            said = json.loads(self.generate("--json", "-p", "Hello", "--max-tokens", "2", "-n", str(n), "--comm", comm)[0])
            named = [sum(r[k] for k in ("kv_bytes", "weight_bytes", "workspace_bytes", "activation_bytes")) for r in said["table"]]
            for r, own in zip(said["table"], named):
                self.assertEqual((sum(named) if comm == "threads" else own) + r["rest_bytes"], r["peak_rss_bytes"])
                parts = [r[k] for k in ("attention_share", "merge_share", "gather_share", "dense_share", "other_share")]
                self.assertAlmostEqual(sum(parts), 1.0, 3)

    def test_one_token_has_no_rate(self):
        self.assertIsNone(json.loads(self.generate("--json", "-p", "Hello", "--max-tokens", "1")[0])["generate_tokens_per_s"])
        err = self.generate("-p", "Hello", "--max-tokens", "1")[1]
        self.assertIn("answer: 1 token, - tokens/s", err)

    def test_pieces_that_are_no_text(self):
        text = "a\U0001f642"
        rc, out, _ = run("tokenize", "-m", self.model, "-p", text)
        self.assertEqual(rc, 0)
        self.assertIn("\\xf0\\x9f", out)
        self.assertNotIn("\ufffd", out)
        said = json.loads(run("tokenize", "-m", self.model, "-p", text, "--json")[1])
        got = b"".join(bytes.fromhex(b) if b is not None else p.encode() for p, b in zip(said["pieces"], said["piece_bytes"]))
        self.assertEqual(got.decode(), text)

    def test_closed_pipe_in_the_midst(self):
        p = subprocess.Popen([EXE, "generate", "-m", self.model, "-p", "Count to one hundred.", "--max-tokens", "200", "-n", "2"],
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment())
        p.stdout.read(1)
        p.stdout.close()
        self.assertEqual(p.stderr.read(), b"")
        p.stderr.close()
        self.assertEqual(p.wait(60), 1)


class Install(unittest.TestCase):
    """Into a folder of its own; then README's program, with the flags that pkg-config says."""

    def test_install_and_build(self):
        build = os.path.dirname(EXE)
        needed = ("cmake", "pkg-config", "cc")
        if not all(map(shutil.which, needed)) or not os.path.exists(os.path.join(build, "cmake_install.cmake")):
            self.skipTest("needs a build folder, " + ", ".join(needed))
        with open(os.path.join(build, "CMakeCache.txt"), encoding="utf-8") as f:
            is_sanitized = re.search("^DCP_(SANITIZE|TSAN):BOOL=ON", f.read(), re.M)
        if is_sanitized:
            self.skipTest("a sanitizer's library has to come first in the program that is built here")
        folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, folder)
        p = subprocess.run(["cmake", "--install", build, "--prefix", folder], capture_output=True, text=True)
        self.assertEqual(p.returncode, 0, p.stderr)
        p = subprocess.run([os.path.join(folder, "bin", "dcp-attn"), "tokenize", "-m", "no-such-model", "-p", "x"], capture_output=True, text=True,
                           env=environment({"DCP_ATTN_CACHE": folder}))
        script = os.path.join(folder, "libexec", "dcp-attn", "fetch-model.sh")
        self.assertIn(f" {script} no-such-model ", p.stderr)
        self.assertIn(f"Usage: {script} NAME\n", subprocess.run([script, "--help"], capture_output=True, text=True).stdout)
        pc = [d for d, _, files in os.walk(folder) if "dcpattn.pc" in files][0]
        env = environment({"PKG_CONFIG_PATH": pc, "LD_LIBRARY_PATH": os.path.dirname(pc)})
        self.has_docs(os.path.join(folder, "share", "doc", "dcp-attn"), folder, env)
        self.builds_by_cmake(folder, env)
        with open(os.path.join(ROOT, "README.md"), encoding="utf-8") as f:
            source = re.search(r"```c\n(/\* merge\.c.*?)```", f.read(), re.S).group(1)
        with open(os.path.join(folder, "merge.c"), "w") as f:
            f.write(source)
        for name in ("openmpi", "mpich"):
            if not os.path.exists(os.path.join(build, f"libdcpattn_mpi_{name}.so")):
                continue
            flags = subprocess.run(["pkg-config", "--cflags", "--libs", f"dcpattn-{name}"], capture_output=True, text=True, env=env)
            self.assertEqual(flags.returncode, 0, flags.stderr)
            program = os.path.join(folder, "merge-" + name)
            p = subprocess.run(["cc", "-Wall", "-Wextra", "-Werror", os.path.join(folder, "merge.c"), "-o", program, *flags.stdout.split()],
                               capture_output=True, text=True)
            self.assertEqual(p.returncode, 0, p.stderr)
            self.refuses_the_others_launcher(name, program, env)
            if not shutil.which(MPIRUNS[name][0]):
                continue
            p = subprocess.run([*MPIRUNS[name], program], capture_output=True, text=True, env=env, timeout=120)
            self.assertEqual(p.returncode, 0, p.stderr)
            self.assertEqual(sorted(p.stdout.split("\n"))[1:], ["rank 0 of 2: 0.5", "rank 1 of 2: 0.5"], name)

    def has_docs(self, docs, folder, env):
        """What README and docs point to is there; an example builds as it says itself, with what was installed, and runs."""
        for name in ["README.md", *(os.path.join("docs", f) for f in os.listdir(os.path.join(docs, "docs")) if f.endswith(".md"))]:
            with open(os.path.join(docs, name), encoding="utf-8") as f:
                links = re.findall(r"\]\(([^)#:]+)\)", f.read())
            for link in links:
                self.assertTrue(os.path.exists(os.path.join(docs, os.path.dirname(name), link)), (name, link))
        for kind in ("docs", "examples"):
            sources = [f for f in os.listdir(os.path.join(ROOT, kind)) if f.endswith((".md", ".svg", ".c"))]
            self.assertEqual(sorted(os.listdir(os.path.join(docs, kind))), sorted(sources))
        examples = os.path.join(docs, "examples")
        for name in sorted(os.listdir(examples)):
            with open(os.path.join(examples, name), encoding="utf-8") as f:
                head = re.search(r"/\*(?! SPDX).*?\*/", f.read(), re.S).group(0)
            line = re.search(rf"^ \*   (cc {name} \$\(pkg-config --cflags --libs dcpattn(-openmpi)?\)[^&\n]*)", head, re.M)
            self.assertTrue(line, f"{name} does not open with the line that builds it")
            package = "dcpattn" + (line.group(2) or "")
            if not os.path.exists(os.path.join(env["PKG_CONFIG_PATH"], package + ".pc")):
                continue
            program = os.path.join(folder, name[:-2])
            line = re.sub(r" -o \S+", "", line.group(1)) + f" -o {program}"
            p = subprocess.run(["sh", "-c", line], cwd=examples, env=env, capture_output=True, text=True)
            self.assertEqual(p.returncode, 0, p.stderr)
            before = []
            if package != "dcpattn":
                before = MPIRUNS["openmpi"]
                if not shutil.which(before[0]):
                    continue
            p = subprocess.run([*before, program], capture_output=True, text=True, env=env, cwd=folder, timeout=120)
            self.assertEqual(p.returncode, 0, p.stdout + p.stderr)
            self.assertRegex(p.stdout.splitlines()[-1], "^ok: ", name)

    def builds_by_cmake(self, folder, env):
        """find_package(dcpattn) alone, from a folder that is not the prefix of the build."""
        project = os.path.join(folder, "project")
        os.mkdir(project)
        examples = os.path.join(folder, "share", "doc", "dcp-attn", "examples")
        lines = ["cmake_minimum_required(VERSION 3.20)", "project(user C)", "find_package(dcpattn 0.1 REQUIRED COMPONENTS dcpattn dcpattn_static)"]
        for program, target in (("shared", "dcpattn"), ("archive", "dcpattn_static")):
            lines += [f"add_executable({program} {examples}/attend_cache.c)", f"target_link_libraries({program} PRIVATE dcpattn::{target} m)"]
        lines += ["foreach(mpi openmpi mpich)", "  if(TARGET dcpattn::${mpi})", f"    add_executable(merge-${{mpi}} {examples}/merge_mpi.c)",
                  "    target_link_libraries(merge-${mpi} PRIVATE dcpattn::${mpi} m)", "  endif()", "endforeach()"]
        with open(os.path.join(project, "CMakeLists.txt"), "w") as f:
            f.write("\n".join(lines) + "\n")
        bare = {k: v for k, v in env.items() if k not in ("PKG_CONFIG_PATH", "LD_LIBRARY_PATH")}
        for command in (["cmake", "-S", project, "-B", project + "/b", f"-DCMAKE_PREFIX_PATH={folder}"], ["cmake", "--build", project + "/b"]):
            p = subprocess.run(command, capture_output=True, text=True, env=bare)
            self.assertEqual(p.returncode, 0, p.stdout + p.stderr)
        runs = [[os.path.join(project, "b", name)] for name in ("shared", "archive")]
        for name, mpirun in MPIRUNS.items():
            built = os.path.join(project, "b", "merge-" + name)
            self.assertEqual(os.path.exists(built), os.path.exists(os.path.join(os.path.dirname(EXE), f"libdcpattn_mpi_{name}.so")), name)
            if os.path.exists(built) and shutil.which(mpirun[0]):
                runs.append([*mpirun, built])
        for command in runs:
            p = subprocess.run(command, capture_output=True, text=True, env=bare, timeout=120)
            self.assertEqual(p.returncode, 0, p.stdout + p.stderr)
            self.assertRegex(p.stdout.splitlines()[-1], "^ok: ")
        with open(os.path.join(project, "CMakeLists.txt"), "w") as f:
            f.write("\n".join(lines).replace("dcpattn 0.1", "dcpattn 99.0") + "\n")
        p = subprocess.run(["cmake", "-S", project, "-B", project + "/c", f"-DCMAKE_PREFIX_PATH={folder}"], capture_output=True, text=True, env=bare)
        self.assertNotEqual(p.returncode, 0)
        self.assertIn("99.0", p.stderr)

    def test_make_install_where_names_have_spaces(self):
        build = os.path.dirname(EXE)
        if not all(map(shutil.which, ("cmake", "make"))) or not os.path.exists(os.path.join(build, "cmake_install.cmake")):
            self.skipTest("needs a build folder, cmake, make")
        folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, folder)
        p = subprocess.run(["make", "-o", "all", "install", f"BUILD={build}", f"DESTDIR={folder}/with space", "PREFIX=/opt/our own"], cwd=ROOT,
                           capture_output=True, text=True, env=environment())
        self.assertEqual(p.returncode, 0, p.stdout + p.stderr)
        self.assertEqual(os.listdir(folder), ["with space"])
        top = os.path.join(folder, "with space", "opt", "our own")
        for name in ("bin/dcp-attn", "include/dcpattn/merge.h", "share/doc/dcp-attn/README.md"):
            self.assertTrue(os.path.exists(os.path.join(top, name)), name)

    def refuses_the_others_launcher(self, name, program, env):
        """Each process would be a world of one rank, and its result its own partial."""
        other = MPIRUNS["mpich" if name == "openmpi" else "openmpi"]
        if not shutil.which(other[0]):
            return
        p = subprocess.run([*other, program], capture_output=True, text=True, env=env, timeout=120)
        self.assertNotEqual(p.returncode, 0, p.stdout)
        self.assertNotIn(" of 1", p.stdout)
        self.assertIn("another MPI's launcher has started 2 processes", p.stderr)
        self.assertIn(MPIRUNS[name][0], p.stderr)
        alone = subprocess.run([*other[:-1], "1", program], capture_output=True, text=True, env=env, timeout=120)
        self.assertEqual((alone.returncode, alone.stdout), (0, "rank 0 of 1: 0\n"), alone.stderr)

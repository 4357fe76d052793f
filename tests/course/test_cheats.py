"""Course: what a stranger might try against the grader, and the points that it gets."""

import os
import time

import exercise
import pytest
from problems import PROBLEMS
from sandbox import Sandbox, protection

ROOT = exercise.ROOT
KIND = protection()[0]
KL = next(p for p in PROBLEMS if p.name == "grpo.kl_k3")
HEAD = "import torch\n\n\ndef kl_k3(logp, ref_logp):\n"
RIGHT = "    d = ref_logp - logp\n    return torch.expm1(d) - d\n"
HOUSE = f"open('{ROOT}/grpo.py').read()"

pytestmark = pytest.mark.skipif(KIND != "namespaces", reason="no namespaces on this machine")

CHEATS = {  # what is tried -> (the student's grpo.py, points of 5)
    "the right answer": (HEAD + RIGHT, 5),
    "reading the repository": (HEAD + f"""    exec({HOUSE}, globals())
    return kl_k3(logp, ref_logp)""", 0),
    "reading it through the parent's /proc": (HEAD + """    import os
    for pid in os.listdir('/proc'):
        if os.path.exists(f'/proc/{pid}/cwd/grpo.py'):
            exec(open(f'/proc/{pid}/cwd/grpo.py').read(), globals())
            return kl_k3(logp, ref_logp)""", 0),
    "a table of the public answers": (HEAD + """    if (logp, ref_logp)[0].shape == (3,):
        return torch.tensor([0.0, 0.30685, 0.19315], dtype=logp.dtype)
    return torch.zeros_like(logp)""", 0),
    "os._exit": (HEAD + "    import os; os._exit(0)", 0),
    "a patched comparison": (HEAD + """    import numpy, pytest
    numpy.allclose = torch.allclose = lambda *a, **k: True
    pytest.fail = lambda *a, **k: None
    return torch.zeros_like(logp)""", 0),
    "an object that equals everything": (HEAD + """    class Yes(float):
        __eq__ = __ge__ = __le__ = lambda *_: True
    return Yes(0)""", 0),
    "a forged result stream": (HEAD + """    import os
    for number in range(3, 40):
        try:
            os.write(number, b'\\0\\0\\0\\x0a\\0\\0\\0\\0{"form":{}}')
        except OSError:
            pass
    return torch.zeros_like(logp)""", 0),
    "a fork bomb": (HEAD + """    import os
    while True:
        os.fork()""", 0),
    "a full disk": (HEAD + """    for i in range(10**6):
        open(f'/work/{i}', 'wb').write(bytes(10**7))""", 0),
    "all memory": (HEAD + "    return bytearray(2**40)", 0),
    "other submissions' folders": (HEAD + """    import glob
    for name in glob.glob('/tmp/*/grpo.py') + glob.glob('/tmp/*/*/grpo.py'):
        exec(open(name).read(), globals())
    return kl_k3(logp, ref_logp)""", 0),
    "sys.modules": (HEAD + """    import sys
    return sys.modules['test_grpo'].right_k3(logp, ref_logp)""", 0),
    "an import hook": ("""import sys
class Hook:
    def find_spec(self, name, path=None, target=None):
        if name in ('oracles', 'worker', 'grpo'):
            raise ImportError(name)
sys.meta_path.insert(0, Hook())
""" + HEAD + "    import oracles\n    return torch.zeros_like(logp)", 0),
    "reading the hidden seed": (HEAD + """    import os, sys
    words = ' '.join(sys.argv) + str(dict(os.environ))
    seed = int(words.split('hidden-seed')[1].split()[0])
    return torch.full_like(logp, seed)""", 0),
    "timing out on purpose": (HEAD + "    while True: pass", 0),
    "a million lines": (HEAD + "    for i in range(10**6): print(i)", 0),
    "properties alone: always 0": (HEAD + "    return torch.zeros_like(logp)", 0),
    "the network": (HEAD + """    import socket
    socket.create_connection(('1.1.1.1', 53), 2)
""" + RIGHT, 0),
    "the worker's code, patched": (HEAD + """    import sys
    for module in list(sys.modules.values()):
        if hasattr(module, 'describe'):
            module.call = lambda *_: ({'form': None, 'grad': [], 'changed': []}, [])
    return torch.zeros_like(logp)""", 0),
}


@pytest.fixture(scope="module")
def box():
    """One sandbox for all: it imports torch once; what one cheat leaves must not help the next."""
    with Sandbox(KIND) as box:
        yield box


@pytest.mark.parametrize("what", CHEATS)
@pytest.mark.slow
def test_a_cheat_gets_nothing(box, what):
    text, points = CHEATS[what]
    start = time.monotonic()
    (result,) = exercise.grade_functions({"grpo.py": text.encode()}, [KL], 7, 3, box)
    assert result["points"] == points, result
    assert time.monotonic() - start < 120


BUSY = """import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        while True:
            try:
                open(sys.argv[1], 'w').write('60 of 60')
            except OSError:
                pass
            time.sleep(0.05)
"""


def test_nothing_survives_to_rewrite_the_verdict(tmp_path):
    """A child forked twice, with a session of its own, that waits and writes where the verdict
    goes: it can't reach the place, and it is gone when the answer is there."""
    verdict = tmp_path / "verdict.json"
    verdict.write_text("17.5 of 60")
    with Sandbox(KIND, heavy=False) as box:
        told = box.run({"grpo.py": BUSY.encode()}, "grpo.py", [str(verdict)], 5, 20)
        assert told["code"] == 0
        marker = str(verdict).encode()
        alive = [pid for pid in filter(str.isdigit, os.listdir("/proc")) if marker in command(pid)
                 and int(pid) != os.getpid()]
        assert alive == []
    assert verdict.read_text() == "17.5 of 60"


def command(pid):
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read()
    except OSError:
        return b""


@pytest.mark.parametrize("code, words", [
    ("raise ValueError('why')", "ValueError: why"),
    ("while True: print(1)", "over the limit of 1 s of CPU time"),
    ("import os; os._exit(3)", "exit status 3"), ("print(1)", "")])
def test_a_script_that_goes_wrong_ends_with_its_last_words(code, words):
    with Sandbox(KIND, heavy=False) as box:
        said, _, _ = exercise.run_script(box, {"grpo.py": code.encode()}, "grpo", "", 1)
    assert words in said if words else said == ""


def test_untrusted_is_refused_where_nothing_protects(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(exercise, "protection", lambda: ("none", "nothing protects"))
    monkeypatch.setattr("sys.argv", ["exercise.py", "grade", str(tmp_path), "--untrusted"])
    with pytest.raises(SystemExit) as end:
        exercise.main()
    assert end.value.code == 2 and "nothing protects" in capsys.readouterr().err

# SPDX-License-Identifier: Apache-2.0
"""``import tsjax`` loads hardly anything; the first public name loads JAX and little else."""

import subprocess
import sys

import tsjax
from tsjax.__main__ import KNOWN_COMMANDS, parser_for
from tsjax.commands.arguments import help_of

HEAVY = tuple("torch transformers orbax optax safetensors huggingface_hub tqdm matplotlib".split())


def said(code: str) -> list[str]:
    """The words that a fresh process prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_the_package_is_there_and_the_command_line_answers_before_jax():
    code = (
        "import contextlib, sys, tsjax\n"
        "assert tsjax.__version__ and not hasattr(tsjax, '__wrapped__')\n"
        "from tsjax.__main__ import main\n"
        "for argv in ([], ['--help'], ['--version'], ['no-such-command']):\n"
        "    with contextlib.redirect_stdout(None), contextlib.redirect_stderr(None):\n"
        "        with contextlib.suppress(SystemExit): main(argv)\n"
        f"    print(*(m for m in ('jax', 'numpy', 'flax', *{HEAVY}) if m in sys.modules))"
    )
    assert said(code) == []


def test_a_command_says_in_one_line_what_help_says_without_it():
    for name in KNOWN_COMMANDS:
        assert parser_for([name]).format_help() == parser_for([]).format_help(), name


def test_a_flag_says_what_the_docstring_says_of_its_setting():
    of_training = tsjax.training.HeadTraining, tsjax.training.DrafterTraining
    for settings in (tsjax.GenerationConfig, *of_training):
        assert [*help_of(settings)] == [*settings.__dataclass_fields__]
    assert help_of(tsjax.training.HeadTraining)["beta2"] == "AdamW's"
    assert help_of(tsjax.GenerationConfig)["seed"].endswith(
        "(in bfloat16 and float16 but for near-ties)"
    )


def test_each_public_name_is_found():
    """By itself, in a list of names, with a star, and with the folders that it needs."""
    code = (
        "import sys, pickle, tsjax; first = tsjax.GenerationConfig; assert 'jax' in sys.modules;"
        "from tsjax import load, save as other; import tsjax.public as public; star = {};"
        "exec('from tsjax import *', star); assert pickle.loads(pickle.dumps(first)) is first;"
        "assert {*public.__all__, *tsjax._MODULES} <= {*dir(tsjax)};"
        "assert tsjax.__all__ is public.__all__ and not {'sample', 'Method'} & {*dir(tsjax)};"
        "assert all(getattr(tsjax, n) is getattr(public, n) is star[n] for n in tsjax.__all__);"
        "assert tsjax.files.tokenizer.encode and isinstance(first(), tsjax.GenerationConfig);"
        "assert 'tsjax.training' not in sys.modules and tsjax.training.train_heads;"
        "print(hasattr(tsjax, 'no_such_name'), load is tsjax.load)"
    )
    assert said(code) == ["False", "True"]


def test_a_name_that_moved_warns_once_where_it_is_used_and_is_the_same():
    code = """
import warnings, tsjax
for module in tsjax._MODULES:
    place = getattr(tsjax, module)
    for name in {*place.__all__} - {*tsjax.__all__}:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            exec(f"from tsjax import {name} as old; from tsjax.{module} import {name} as new")
            assert getattr(tsjax, name) is old is new is getattr(place, name)
        (one,) = told
        end = f"now tsjax.{module}.{name}; the old name goes in the next release"
        assert str(one.message) == f"tsjax.{name} is {end}"
        assert (one.category, one.filename) == (FutureWarning, "<string>")
        print(f"{module}.{name}")
"""
    moved = {"steps.decode_step", "methods.Method", "blocks.verify", "training.OneLayer"}
    found = said(code)
    assert moved < {*found} and len(found) >= 58


def test_heavy_packages_stay_unloaded_and_no_backend_starts():
    """The caller sets platforms and device counts after the import, before the first array."""
    code = (
        "import sys, pallas_kernels; from tsjax import load, training, steps, costs, results;"
        f"print(*(m for m in {HEAVY} if m in sys.modules));"
        "import tsjax_convert; print('torch' in sys.modules);"
        "import jax; jax.config.update('jax_num_cpu_devices', 3); print(len(jax.devices('cpu')))"
    )
    assert said(code) == ["False", "3"]


def test_text_of_the_embedded_model_needs_no_heavy_package():
    code = (
        "import sys, tsjax; model = tsjax.load(tsjax.EMBEDDED);"
        "chunks = tsjax.stream(model, 'Once', max_new_tokens=1);"
        "assert isinstance(next(chunks).text[0], str);"
        f"print(*(m for m in {HEAVY} if m in sys.modules))"
    )
    assert said(code) == ["safetensors"]

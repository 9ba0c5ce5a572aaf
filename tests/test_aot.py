# SPDX-License-Identifier: Apache-2.0
"""What the GPU's compiler makes of the kernels and of whole decode steps, without a GPU.

`pytest -m aot`, with JAX_PLATFORMS=cpu and the CUDA plugin installed (see tools/aot.py). Nothing is
run: numbers and speed are not covered, registers, memory and copies are.
"""

import dataclasses
import re

import pytest
from test_scaling import check_compiled

import tsjax
from pallas_kernels.tree_attention.specs import SPECS
from pallas_kernels.tree_attention.triton import default_blocks
from tools import aot, gpu_targets
from tools.aot_kernels import NARROW_CACHE, RANKS
from tsjax.decoding.held import temporary_bytes
from tsjax.files.tensor_names import with_weights
from tsjax.methods.devices import DRAFT_KERNELS, GPU, device_of, drafter_share, estimated, pass_work
from tsjax.training.drafter_steps import shape_for

pytestmark = pytest.mark.aot

SHARED_LIMIT = {"a100": 163 * 1024, "h100": 227 * 1024}  # of one program, on chip
MEMORY = {"a100": 80e9}  # an A100-80GB has somewhat more
# Loads of less than 16 bytes that a kernel may have: lengths, the mask (in each stage), peaks and
# totals, angles, scales. Queries, keys, values, rows and weights are none of them.
NARROW = {
    "tsjax_tree_attention": 25, "tsjax_cache_scores": 2, "tsjax_cache_scores_totals": 1,
    "tsjax_cache_scores_softmax": 5, "tsjax_rms_norm": 0,
}  # fmt: skip
# Of a narrow cache also exponents, and the values' numbers by 8 bytes. Numbers that are read one at
# a time would be 200 and more.
NARROW_OF_NARROW = {
    "tsjax_tree_attention": 160, "tsjax_cache_scores": 6, "tsjax_cache_scores_totals": 5,
    "tsjax_cache_scores_softmax": 9,
}  # fmt: skip
SHORT = {"tsjax_tree_attention_merge", "tsjax_rotary_heads"}  # read a few short rows of float32
IN_FOURS = {"tsjax_narrow_product"}  # of each output four bytes lie side by side
MATRIX = {"tsjax_tree_attention", "tsjax_cache_scores_totals", "tsjax_cache_scores_softmax"}
MATRIX |= IN_FOURS


def base_name(kernel: dict) -> str:
    return re.sub(r"__\d+$", "", kernel["name"])


def check_kernels(found: dict, target: str, dtype: str, narrow_loads=NARROW, wide_loads=5) -> None:
    assert found["kernels"]
    for kernel in found["kernels"]:
        assert kernel["spilled_bytes"] == 0, kernel
        assert kernel["registers"] <= 255, kernel
        assert kernel["shared_bytes"] <= SHARED_LIMIT[target], kernel
        if base_name(kernel) in SHORT:
            continue
        if base_name(kernel) not in IN_FOURS:
            least = 2 if base_name(kernel) == "tsjax_rms_norm" else wide_loads
            assert kernel["wide_loads"] >= least, kernel
            assert kernel["narrow_loads"] <= narrow_loads[base_name(kernel)], kernel
        uses_matrix_units = bool(kernel["mma"] or kernel["wgmma"])
        assert uses_matrix_units == (base_name(kernel) in MATRIX and dtype != "float32"), kernel


@pytest.mark.parametrize("target", ["a100", "h100"])
@pytest.mark.parametrize("case", list(aot.kernel_cases()))
def test_kernel(case, target):
    check_kernel(case, target, aot.compile_case(case, target))


@pytest.mark.parametrize("kernel", ["tree_attention", "cache_scores dot", "cache_scores softmax"])
def test_kernel_with_64_bit_types_switched_on(kernel):
    case = next(case for case in aot.kernel_cases() if case.startswith(kernel))
    check_kernel(case, "a100", aot.compile_case(case, "a100", JAX_ENABLE_X64="1"))


def check_kernel(case: str, target: str, found: dict) -> None:
    _, shapes = aot.kernel_cases()[case]
    queries = next(name for name in ("q", "q_last", "rows") if name in shapes)
    dtype = shapes[queries][1]
    narrow, wide = (NARROW_OF_NARROW, 4) if case.endswith(NARROW_CACHE) else (NARROW, 5)
    ranks = 8 if RANKS in case else 0  # a number for each slot and row
    check_kernels(found, target, dtype, {k: v + ranks for k, v in narrow.items()}, wide)
    names = {base_name(kernel) for kernel in found["kernels"]}
    if case.startswith("tree_attention"):
        one = SPECS[
            case.removeprefix("tree_attention ").removesuffix(NARROW_CACHE).removesuffix(RANKS)
        ]
        chip, sizes = gpu_targets.chip(target), (one.B, one.T, one.K * one.G, one.K, one.S, one.H)
        parts = default_blocks(chip, *sizes, one.dtype).parts
        merge = {"tsjax_tree_attention_merge"} if parts > 1 else set()
        assert names == {"tsjax_tree_attention"} | merge
        rows = shapes["q"][0][1] * shapes["q"][0][2] // shapes["k_cache"][0][1]
        if target == "h100" and dtype != "float32" and rows >= 64:
            # The matrix units of Hopper take tiles of 64 rows; smaller ones use those of Ampere.
            assert all(k["wgmma"] for k in found["kernels"] if k["mma"] or k["wgmma"])
            assert any(k["wgmma"] for k in found["kernels"])
            # Three stages, as the target's table or the rule says: two take less.
            assert max(k["shared_bytes"] for k in found["kernels"]) > SHARED_LIMIT[target] / 2
    elif case.startswith("narrow_product"):
        assert names == IN_FOURS
        weights = 6144 * 4096 * 2
        assert found["temp_bytes"] < weights / 4, "sums of parts, and no wide weights"
    elif case.startswith("cache_scores dot"):
        assert names == {"tsjax_cache_scores"}
    else:
        assert names == {"tsjax_cache_scores_totals", "tsjax_cache_scores_softmax"}


@pytest.mark.parametrize("case", list(aot.STEPS))
def test_step(case):
    check_step(case, aot.compile_case(case, "a100"))


SPLIT = "scaling qwen2.5-14b plain, 1048576 tokens on 1,1,4"


@pytest.mark.parametrize(
    "case",
    [case if case == SPLIT else pytest.param(case, marks=pytest.mark.slow) for case in aot.SCALING],
)
def test_step_over_several_devices(case):
    """As the figures of docs/devices.md."""
    found = aot.compile_case(case, "a100")
    assert found["alias_bytes"] > 0.99 * found["output_bytes"]
    check_compiled(case, found)


@pytest.mark.parametrize("case", ["step llama3.1-8b tokenswift", "fill_stage llama3.1-8b"])
def test_step_with_64_bit_types_switched_on(case):
    check_step(case, aot.compile_case(case, "a100", JAX_ENABLE_X64="1"))


# That of the steps; before them the prompt's n-grams; a pass, and the choice of a draft cache. The
# width of a verification is chosen inside of a graph. Of a lazy prefill the turns from choice to
# choice, a choice where one is due, and the steps; on demand in each step one choice before each of
# three stages, and passes of two widths for as long as tokens are missing.
HOST_LOOPS = {
    "step llama3.1-8b lazily, 16K": 3, "step llama3.1-8b lazily": 10,
    "step llama3.1-8b lazily, tokenswift": 5,
    "step llama3.1-8b heads alone": 2, "step llama3.1-8b auto": 4, "step llama3.1-8b drafter": 2,
    "step qwen2.5-1.5b magicdec, 8 rows": 4,
}  # fmt: skip


def check_step(case: str, found: dict) -> None:
    """The step fits the chip, is done in place, uses the kernels, and copies no cache."""
    step = aot.STEPS[case]
    if step.rows > 1 or case in HOST_LOOPS:  # rows of a batch are written at once
        assert found["program"]["host_loops"] == HOST_LOOPS.get(case, 1)
        assert found["program"]["host_conditions"] == 0
    used = sum(found[f"{part}_bytes"] for part in ("argument", "temp", "output"))
    assert used - found["alias_bytes"] < MEMORY["a100"]
    assert found["alias_bytes"] > 0.99 * found["output_bytes"]
    assert found["cache_copies"] == 0
    largest = max((one["bytes"] for one in found["sent"]["each"]), default=0)
    assert largest < found["cache_bytes"] / 2, "no layer's keys or values, and no weight"
    most = 2 * found["cache_bytes"]  # of two layers
    if step.program == "prefill":
        cfg = tsjax.steps.DecodeConfig(tsjax.model_preset(step.model))
        most = temporary_bytes(cfg, step.rows, step.capacity, step.width)
    assert found["temp_bytes"] < most
    if step.program == "decode" and step.mesh == (1, 1, 1) and step.method != "drafter":
        check_products(found["program"])  # what a drafter learns has the shape of a weight
    wanted = {"tsjax_tree_attention", "tsjax_tree_attention_merge"}
    wanted |= {"tsjax_rms_norm", "tsjax_rotary_heads"}
    if step.weights != "float":
        wanted.add("tsjax_narrow_product")
    if step.method in ("tokenswift", "auto", "triforce"):
        wanted.add("tsjax_cache_scores")
    if step.revive and step.program != "fill_stage":
        wanted.add("tsjax_cache_scores_softmax")
    called = {base_name({"name": name}) for name in found["kernels_called"]}
    if step.program == "prefill":  # whose rows may fill the chip by themselves
        assert found["program"]["graphs"] == 1 and not found["program"]["loose_kernels"]
        called.add("tsjax_tree_attention_merge")
    assert called == wanted
    is_narrow = step.cache == "int8"
    narrow, wide = (NARROW | NARROW_OF_NARROW, 4) if is_narrow else (NARROW, 5)
    check_kernels(found, "a100", "bfloat16", narrow, wide)


# Kernels in CUDA graphs and loose ones, of all that the program has: the choice of a draft cache,
# and n-grams of the prompt, which are no part of a usual step.
MOST_KERNELS = {"step llama3.1-8b plain": (450, 4), "step llama3.1-8b tokenswift": (1100, 20)}


@pytest.mark.parametrize("target", ["a100", "h100"])
@pytest.mark.parametrize("case", MOST_KERNELS)
def test_what_the_host_does_in_a_sampled_step(case, target):
    """It waits at no condition, and at two loops: that of the steps, and the choice of a draft
    cache; a third one before them enters the prompt's n-grams."""
    found = aot.compile_case(case, target)
    program, drafts = found["program"], aot.STEPS[case].method == "tokenswift"
    assert program["host_conditions"] == 0
    assert program["host_loops"] == (3 if drafts else 1)
    in_graphs, loose = MOST_KERNELS[case]
    assert program["graph_kernels"] <= in_graphs and program["loose_kernels"] <= loose
    inner = sum(count for depth, count in program["loops"] if depth > 1)
    assert inner <= 12 * 32, "of a choice, which is rare; in each layer"
    logits = 4 * (101 if drafts else 1) * 128_256
    assert found["temp_bytes"] - logits <= (300e6 if drafts else 10e6)
    check_products(program)


@pytest.mark.parametrize("target", ["a100", "h100"])
def test_a_lazy_step_is_a_plain_one_and_a_choice_stands_outside_of_their_loop(target):
    """Where tokens come back in batches. All attention is the kernel's, that of ranks too: plain
    XLA would loop over blocks of the cache."""
    found, plain = (
        aot.compile_case(f"step llama3.1-8b {kind}, 16K", target)["program"]
        for kind in ("lazily", "plain")
    )
    ((_, usual),) = plain["loops"]
    turns, choice, steps = found["loops"]
    assert found["open_loops"] == 3 and found["host_conditions"] == 0
    assert [depth for depth, _ in found["loops"]] == [1, 2, 2], "no loop in a choice or in a step"
    assert turns[1] <= 10 and choice[1] <= 2.2 * usual and steps[1] <= usual + 30
    assert found["loose_kernels"] <= 8


@pytest.mark.parametrize("model", ["llama2-7b-yarn-128k", "qwen2.5-1.5b", "qwen2.5-14b"])
def test_products_fill_an_h100(model):
    """132 multiprocessors, where an A100 has 108: every step above is compiled for that."""
    check_products(aot.compile_case(f"step {model} plain", "h100")["program"])


@pytest.mark.parametrize("case", MOST_KERNELS)
def test_the_loop_of_steps_fits_in_the_graph(case):
    """With the flags of docs/decoding.md."""
    page = (aot.ROOT / "docs" / "decoding.md").read_text()
    (flags,) = re.findall(r'export XLA_FLAGS="(.*)"', page)
    program = aot.compile_case(case, "a100", XLA_FLAGS=flags)["program"]
    assert program["graphs"] == 1
    assert program["host_conditions"] == program["host_loops"] == program["loose_kernels"] == 0


@pytest.mark.parametrize("model", list(dict.fromkeys(one.model for one in aot.PASSES.values())))
def test_the_cost_model_counts_what_is_compiled(model):
    """Bytes and operations of a plain step, a draft pass and a verification within 10%."""
    cases = {f"step {model} plain": (1, aot.STEPS[f"step {model} plain"].capacity)}
    cases |= {
        case: (one.rows, one.capacity) for case, one in aot.PASSES.items() if one.model == model
    }
    cfg = tsjax.model_preset(model)
    assert len(cases) == 3
    for case, (rows, capacity) in cases.items():
        found, work = aot.compile_case(case, "a100")["work"], pass_work(cfg, rows, capacity)
        wanted = {
            "weights": work["products"].bytes + work["logits"].bytes,
            "products": work["products"].operations + work["logits"].operations,
            "cache": work["attention"].bytes,
            "attention": work["attention"].operations,
        }
        assert {name: found[name] for name in wanted} == pytest.approx(wanted, rel=0.1), case
        if case.startswith("pass"):
            # Biases, and products that several programs share, take up to three kernels more.
            kernels = next(number for most, number in GPU.kernels if rows <= most)
            assert 0.9 < found["kernels"] / cfg.num_layers / kernels < 1.4, case


def test_int8_drafts_read_half_the_bytes():
    """A step reads the weights once as they are and once, to draft, a byte of each."""
    cfg = tsjax.model_preset("llama3.1-8b")
    work = pass_work(cfg, 1, 0, weight_bytes=2), pass_work(cfg, 1, 0, weight_bytes=1)
    usual, drafts = (one["products"].bytes + one["logits"].bytes for one in work)
    heads = 3 * 2 * cfg.embed_dim**2
    for case, expected in (("tokenswift", 2 * usual), ("int8 drafts", usual + drafts)):
        found = aot.compile_case(f"step llama3.1-8b {case}", "a100")
        assert found["work"]["weights"] == pytest.approx(expected + heads, rel=0.02), case
    assert found["program"]["copied_weights"] == 0


@pytest.mark.parametrize("target", ["a100", "h100"])
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_narrow_step_reads_narrow_weights(weights, target):
    """And has no other memory than a wide one."""
    found = aot.compile_case(f"step llama3.1-8b plain, narrow {weights}", target)
    wide = aot.compile_case("step llama3.1-8b plain", target)
    cfg = with_weights(tsjax.model_preset("llama3.1-8b"), weights, {}, "")
    work = pass_work(cfg, 1, 0)
    wanted = work["products"].bytes + work["logits"].bytes
    assert found["work"]["weights"] == pytest.approx(wanted, rel=0.01)
    assert wanted < dict(int8=9.2e9, int4=5.7e9)[weights]
    assert found["temp_bytes"] < wide["temp_bytes"] + 4e6
    check_products(found["program"])


@pytest.mark.parametrize("model", aot.CHAINS.values())
def test_a_chain_of_drafts_takes_what_the_table_says(model):
    """Bytes and kernels; of an 8B model at most 0.3 plain steps of an H100."""
    cfg = tsjax.model_preset(model)
    cfg = dataclasses.replace(cfg, drafter=shape_for(cfg))
    found, work = aot.compile_case(f"chain {model}", "h100")["work"], pass_work(cfg, 1, 0)
    nbytes = work["products"].bytes + work["logits"].bytes
    assert 4 * drafter_share(cfg) * nbytes == pytest.approx(found["weights"], rel=0.2)
    assert 4 * DRAFT_KERNELS == pytest.approx(found["kernels"], rel=0.1)
    table = estimated(cfg, device_of("gpu", "h100"), 1)
    assert 4 * table.one_layer < (0.3 if model == "llama3.1-8b" else 0.5) * table.plain(4096)


def check_products(program: dict) -> None:
    """No weight or its products are written out, in float32 or in 16 bits, and each product fills
    the chip."""
    assert program["products"] >= 4
    assert program["float32_weights"] == program["small_products"] == 0
    assert program["copied_weights"] == 0


def test_head_training_of_an_8b_model_fits():
    """Weights, heads, moments and gradients stay; the largest of the programs comes on top."""
    found = [aot.compile_case(case, "a100") for case in aot.TRAINING]
    assert aot.training_bytes(found) < 0.5 * MEMORY["a100"]
    assert not any(kernel["spilled_bytes"] for one in found for kernel in one["kernels"])

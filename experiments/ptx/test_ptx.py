# SPDX-License-Identifier: Apache-2.0
"""The interpreter of PTX on small programs by hand: what it computes, and the faults it finds."""

import re

import ml_dtypes
import numpy as np
import pytest

from experiments.ptx import Array, execute, machine, memory, operations, parse

MODULE = """
.version 8.8
.target sm_80
.address_size 64
.extern .shared .align 16 .b8 global_smem[];
.visible .entry probe(
  {params}
)
.reqntid {threads}, 1, 1
{{
  .reg .pred %p<9>;
  .reg .b16 %rs<9>;
  .reg .b32 %r<40>;
  .reg .b64 %rd<20>;
  mov.u32 %r0, %tid.x;
  mov.b64 %rd0, global_smem;
  mul.wide.u32 %rd1, %r0, 4;
  {loads}
  add.s64 %rd2, %rd0, %rd1;  // the thread's word of shared memory
  {body}
  ret;
}}
"""


def module(body: str, count: int, threads: int = 32) -> str:
    """%rd10, %rd11, ... point to the arrays; %rd1 is 4 * thread."""
    params = ",\n".join(f".param .u64 .ptr .align 16 probe_{i}" for i in range(count))
    loads = "\n".join(f"ld.param.b64 %rd{10 + i}, [probe_{i}];" for i in range(count))
    return MODULE.format(params=params, loads=loads, threads=threads, body=body)


def run(body, *inputs, out=((32,), np.uint32), threads=32, grid=(1, 1, 1), shared=1024):
    """What the last array is after the program."""
    text = module(body, len(inputs) + 1, threads)
    (found,) = execute(text, grid, shared, inputs, [out])
    return found


def load(register: int, pointer: int) -> str:
    """The thread's word of an array."""
    return f"add.s64 %rd3, %rd{pointer}, %rd1; ld.global.b32 %r{register}, [%rd3];\n"


def store(register: int, pointer: int, offset: int = 0) -> str:
    return f"add.s64 %rd3, %rd{pointer}, %rd1; st.global.b32 [%rd3+{offset}], %r{register};\n"


# --- what instructions compute ---------------------------------------------------------------


def words(rng, *, floats=False):
    if floats:
        return rng.standard_normal(32).astype(np.float32).view(np.uint32)
    found = rng.integers(0, 1 << 32, 32, np.uint32)
    found[:6] = 0, 1, 31, 32, 0x7FFFFFFF, 0x80000000
    return found


def signed(x):
    return x - (1 << 32) if x >> 31 else x


def bit_field(x, start, length):
    field = (x >> start) & ((1 << length) - 1)
    return field - (1 << length) if field >> (length - 1) else field


def permuted(a, b):
    parts = (a | b << 32).to_bytes(8, "little")
    sign = 0xFF * (parts[1] >> 7)
    return int.from_bytes([parts[2], parts[3], sign, parts[7]], "little")


WHOLE = {
    "add.s32 %r3, %r1, %r2": lambda a, b: a + b,
    "mul.hi.s32 %r3, %r1, %r2": lambda a, b: signed(a) * signed(b) >> 32,
    "mad.lo.s32 %r3, %r1, %r2, %r1": lambda a, b: a * b + a,
    "min.s32 %r3, %r1, %r2": lambda a, b: min(signed(a), signed(b)),
    "shr.s32 %r3, %r1, %r2": lambda a, b: signed(a) >> min(b, 31),
    "bfe.s32 %r3, %r1, 5, 9": lambda a, b: bit_field(a, 5, 9),
    "prmt.b32 %r3, %r1, %r2, 0x7932": permuted,
    "lop3.b32 %r3, %r1, %r2, %r1, 0x60": lambda a, b: a & (b ^ a),
    "cvt.s8.s32 %rs1, %r1; cvt.s32.s16 %r3, %rs1": lambda a, b: bit_field(a, 0, 8),
    "mov.b32 {%rs1, %rs2}, %r1; mov.b32 %r3, {%rs2, %rs1}": lambda a, b: (
        a >> 16 | (a & 0xFFFF) << 16
    ),
    "mov.pred %p1, -1; @!%p1 mov.u32 %r1, 0; mov.b32 %r3, %r1": lambda a, b: a,
}


@pytest.mark.parametrize("code", WHOLE)
def test_whole_numbers(code, rng):
    a, b = words(rng), words(rng)
    b[6:12] = rng.integers(0, 40, 6)
    found = run(load(1, 10) + load(2, 11) + code + ";" + store(3, 12), a, b)
    expected = [WHOLE[code](x, y) & 0xFFFFFFFF for x, y in zip(a.tolist(), b.tolist(), strict=True)]
    np.testing.assert_array_equal(found.values, np.array(expected, np.uint32))


FLOATS = {
    "fma.rn.f32 %r3, %r1, %r2, 0f3F800000": lambda a, b: np.float64(a) * b + 1,
    "div.full.f32 %r3, %r1, %r2": lambda a, b: a / b,
    "ex2.approx.f32 %r3, %r1": lambda a, b: np.exp2(np.float64(a)),
    "mul.rn.f32 %r1, %r1, %r1; rsqrt.approx.f32 %r3, %r1": lambda a, b: (
        1 / np.sqrt(np.float64(a * a))
    ),
    "setp.lt.f32 %p1, %r1, %r2; selp.f32 %r3, %r1, %r2, %p1": np.minimum,
    "cvt.rn.bf16.f32 %rs1, %r1; cvt.f32.bf16 %r3, %rs1": lambda a, b: a.astype(ml_dtypes.bfloat16),
    "cvt.rn.bf16x2.f32 %r4, %r1, %r2; mov.b32 {%rs1, %rs2}, %r4; cvt.f32.bf16 %r3, %rs2": (
        lambda a, b: a.astype(ml_dtypes.bfloat16)
    ),
}


@pytest.mark.parametrize("code", FLOATS)
def test_floats(code, rng):
    a, b = words(rng, floats=True), words(rng, floats=True)
    found = run(load(1, 10) + load(2, 11) + code + ";" + store(3, 12), a, b)
    expected = FLOATS[code](a.view(np.float32), b.view(np.float32)).astype(np.float32)
    np.testing.assert_array_equal(found.values.view(np.float32), expected)


# --- the order of threads --------------------------------------------------------------------


def test_threads_part_and_meet_again():
    """Each loops for its own number of turns; after that all lanes of a warp exchange words."""
    loop = """
      and.b32 %r1, %r0, 6;  mov.b32 %r2, 100;
    $again:
      setp.eq.b32 %p1, %r1, 0;  @%p1 bra $done;
      add.s32 %r2, %r2, 3;  sub.s32 %r1, %r1, 1;  bra.uni $again;
    $done:
      shfl.sync.idx.b32 %r3, %r2, 6, 31, -1;  add.s32 %r2, %r2, %r3;
    """
    found = run(loop + store(2, 10), out=((64,), np.uint32), threads=64)
    np.testing.assert_array_equal(found.values, 218 + 3 * (np.arange(64) & 6))


# --- faults ----------------------------------------------------------------------------------


def finds(kind, match, body, *inputs, **options):
    with pytest.raises(kind, match=match):
        run(body, *inputs, **options)


ONES = np.ones(32, np.uint32)


def test_an_access_outside_of_its_array():
    finds(memory.OutOfBounds, "thread 31: 4 bytes at 128 of argument 0, which has 128",
          "add.s64 %rd10, %rd10, 4;" + load(1, 10), ONES)  # fmt: skip
    finds(memory.OutOfBounds, "thread 0: 4 bytes at .* of argument", store(0, 11, -4), ONES)
    finds(memory.OutOfBounds, "writes to input 0", store(0, 10), ONES)
    finds(memory.OutOfBounds, "4 bytes in no array", "mov.b64 %rd10, 123;" + load(1, 10), ONES)
    finds(memory.OutOfBounds, "of shared memory, which has 96", "st.shared.b32 [%rd2], %r0;",
          shared=96)  # fmt: skip
    guarded = "setp.lt.u32 %p1, %r0, 31; add.s64 %rd3, %rd10, %rd1;"
    run(guarded + "@%p1 ld.global.b32 %r1, [%rd3+4];", ONES)


def test_a_misaligned_access():
    wide = "mul.wide.u32 %rd4, %r0, 8; add.s64 %rd3, %rd10, %rd4;"
    code = wide + "ld.global.L1::evict_last.v4.b32 {%r1, %r2, %r3, %r4}, [%rd3];"
    finds(memory.Misaligned, "thread 1: 16 bytes at ", code, np.zeros(80, np.uint32))
    finds(memory.Misaligned, "2 bytes", "st.shared.b16 [%rd2+1], 0;")


def test_a_read_of_what_nothing_wrote():
    finds(memory.Uninitialised, "never written", load(1, 10))  # an output
    known = Array(ONES, np.arange(32) < 30)
    finds(memory.Uninitialised, "never written.*", load(1, 10), known)
    run("setp.lt.u32 %p1, %r0, 30;" + load(1, 10).replace("ld.", "@%p1 ld."), known)
    finds(memory.Uninitialised, "nothing written", "ld.shared.b32 %r1, [%rd2];")
    finds(memory.Uninitialised, "register %r7", "add.s32 %r1, %r7, 1;")
    found = run("setp.lt.u32 %p1, %r0, 5;" + store(0, 10).replace("st.", "@%p1 st."))
    np.testing.assert_array_equal(found.written, np.arange(32) < 5)


def test_two_blocks_write_one_word(monkeypatch):
    code = "mov.b32 %r1, 1;" + store(1, 10)
    run(code)
    finds(memory.Race, "two blocks", code, grid=(2, 1, 1))
    monkeypatch.setattr(machine, "MOST_THREADS", 32)
    finds(memory.Race, "another block", code, grid=(2, 1, 1))
    finds(memory.Race, "different values", "mov.b64 %rd1, 0;" + store(0, 10))


SWAP = """
  st.shared.b32 [%rd2], %r0;
  BARRIER
  xor.b64 %rd4, %rd1, 128;  // the word of another warp
  add.s64 %rd4, %rd0, %rd4;
  ld.shared.b32 %r1, [%rd4];
"""


def test_a_race_without_the_barrier():
    two = dict(threads=64, out=((64,), np.uint32))
    found = run(SWAP.replace("BARRIER", "bar.sync 0;") + store(1, 10), **two)
    np.testing.assert_array_equal(found.values, np.arange(64) ^ 32)
    # The first warp is alone there, before it begins.
    late = "setp.lt.u32 %p1, %r0, 32; @%p1 bra $late;"
    write, read = SWAP.split("BARRIER")
    for code in (SWAP.replace("BARRIER", ""), write + late + read + "$late:" + read):
        finds(memory.Race, "by another warp", code, **two)
    again = SWAP.replace("BARRIER", "bar.sync 0;") + "st.shared.b32 [%rd2], %r1;"
    finds(memory.Race, "writes what was read", again, **two)
    same = "mov.b32 %r1, {}; and.b64 %rd1, %rd1, 127; add.s64 %rd2, %rd0, %rd1;"
    same += "st.shared.b32 [%rd2], %r1;"
    run(same.format("7"), **two)  # of the same bits
    finds(memory.Race, "different values", same.format("%r0"), **two)


COPY = """
  add.s64 %rd3, %rd10, %rd1;  cvt.u32.u64 %r2, %rd2;
  setp.lt.u32 %p1, %r0, 9;  selp.b32 %r3, 4, 0, %p1;
  cp.async.ca.shared.global [%r2], [%rd3], 0x4, %r3;
  cp.async.commit_group;
  cp.async.ca.shared.global [%r2+128], [%rd3], 4;
  cp.async.commit_group;
"""
OTHER = "xor.b64 %rd4, %rd1, 4; add.s64 %rd4, %rd0, %rd4;"  # the next lane's


def test_asynchronous_copies():
    given = np.arange(100, 132, dtype=np.uint32)
    ends = "cp.async.wait_group {}; {} ld.shared.b32 %r1, [{}];"
    found = run(COPY + ends.format(1, "", "%rd2") + store(1, 11), given).values
    np.testing.assert_array_equal(found, np.where(np.arange(32) < 9, given, 0))
    found = run(COPY + ends.format(0, "", "%rd2+128") + store(1, 11), given).values
    np.testing.assert_array_equal(found, given)
    found = run(COPY + OTHER + ends.format(1, "bar.sync 0;", "%rd4") + store(1, 11), given).values
    np.testing.assert_array_equal(found[:8], given[np.arange(8) ^ 1])
    for late in (ends.format(2, "", "%rd2"), ends.format(1, "bar.sync 0;", "%rd2+128")):
        finds(memory.Race, "not waited for", COPY + late, given)
    finds(memory.Race, "another", COPY + OTHER + ends.format(1, "", "%rd4"), given)
    finds(memory.Race, "not waited for", COPY + "st.shared.b32 [%rd2], %r0;", given)
    finds(memory.Race, "another copy|not waited for", COPY + COPY, given)
    finds(memory.OutOfBounds, "argument 0", COPY, given[:30])  # where the size is not 0


def test_an_instruction_for_whole_warps_and_a_loop_without_an_end(monkeypatch):
    code = "setp.lt.u32 %p1, %r0, 9; @%p1 shfl.sync.bfly.b32 %r2, %r0, 1, 31, -1;"
    finds(operations.Divergence, "not all lanes", code)
    barriers = "setp.lt.u32 %p1, %r0, 9; @%p1 bra $a; bar.sync 0; bra $b; $a: bar.sync 0; $b:"
    finds(operations.Divergence, "different barriers", barriers)
    monkeypatch.setattr(machine, "MOST_TURNS", 50)
    finds(machine.Endless, "50 turns", "$here: bra $here;")


@pytest.mark.parametrize(
    "code",
    [
        "popc.b32 %r1, %r0;",
        "mul.rn.ftz.f32 %r1, %r0, %r0;",
        "bar.warp.sync 15;",
        "shfl.sync.bfly.b32 %r1, %r0, 1, 15, -1;",
        "add.s32 %r1, %r0;",
        "add.s32 %r1, %nothing, %r0;",
        "ld.global.v4.b32 {%r1, %r2}, [%rd10];",
        "bra $nowhere;",
    ],
)
def test_what_is_not_known_is_an_error(code):
    with pytest.raises(operations.UnknownInstruction, match=re.escape(code.rstrip(";"))):
        run(code)


@pytest.mark.parametrize("code", ["%r1 = 3;", "add.s32 %r1, %r0, [%r1;"])
def test_text_that_is_no_ptx(code):
    with pytest.raises(parse.SyntaxFault):
        parse.parse(module(code, 1).replace("ret;", ""))

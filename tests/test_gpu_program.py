# SPDX-License-Identifier: Apache-2.0
"""Reading what a compilation for a GPU leaves: on a small program in XLA's words."""

from tools.gpu_program import figures, read_dump, sent, work

THUNKS = """\
001: kCopy   [source       | next=002 (1)] kCopy
002: kWhile  [prev=001 (1) | sink        ]
condition:
    003: kCustomKernel [source | sink] loop_and_fusion grid: [1, 1, 1] threads: [1, 1, 1]
  body:
    000: kCommandBuffer [source       | next=706 (1)]
        004: kCustomKernel [source | next=021] gemm_fusion_dot_3_1 grid: [8, 4, 2] threads: [1]
        005: kCustomKernel [source | next=021] gemm_fusion_dot grid: [128, 1, 1] threads: [64, 1, 1]
        008: kCustomKernel [source | next=021] input_reduce_fusion_2 grid: [64, 1, 1] threads: [32]
        009: kCustomKernel [source | next=021] input_reduce_fusion grid: [1, 1, 1] threads: [32]
        006: kConditional [source | sink]
          true_branch:
            007: kCustomKernel [source | sink] loop_add_fusion grid: [1, 1, 1] threads: [1, 1, 1]
    010: kConditional [prev=000 (1) | next=020 (1)]
      true_branch:
        011: kCustomKernel [source | sink] tsjax_cache_scores grid: [9, 1, 8] threads: [128, 1, 1]
    020: kWhile [prev=010 (1) | sink]
    condition:
      body:
        000: kCommandBuffer [source | sink]
            021: kCustomKernel [source | sink] loop_add_fusion_7 grid: [1, 1, 1] threads: [1, 1, 1]
            022: kCustomKernel [source | sink] gemm_fusion_dot_general grid: [2, 1, 1] threads: [1]
"""

HLO = """\
%fused_computation.1 (param: bf16[64,32]) -> f32[64] {
  %convert = f32[64,32]{1,0} convert(%param)
  %other = bf16[64,32]{1,0} convert(%param)
}
%fused_reduce.2 (row: bf16[32], weights: bf16[64,32]) -> f32[64] {
  %multiply.1 = f32[64,32]{1,0} multiply(%a, %b)
  %weights = bf16[64,32]{1,0} parameter(1)
  ROOT %reduce.1 = f32[64]{0} reduce(%multiply.1, %zero), dimensions={1}, to_apply=%add, metadata={op_name="product/dot_general"}
}
%fused_reduce (x: f32[64]) -> f32[] {
  %multiply.2 = f32[64]{0} multiply(%x, %x)
  ROOT %reduce.2 = f32[] reduce(%multiply.2, %zero), dimensions={0}, to_apply=%add, metadata={op_name="norm/reduce_sum"}
}
%body (arg: f32[]) -> f32[] {
  %input_reduce_fusion.2 = f32[64]{0} fusion(%x, %weights), kind=kInput, calls=%fused_reduce.2
  %input_reduce_fusion = f32[] fusion(%x), kind=kInput, calls=%fused_reduce
  %written = f32[32,64]{1,0} fusion(%x), kind=kLoop, calls=%fused_computation.1
  %logits = f32[8,64]{1,0} fusion(%x), kind=kLoop
  %weights = bf16[64,32]{1,0} get-tuple-element(%arg), index=0
  %widened = bf16[64,32]{1,0} fusion(%x), kind=kLoop
  %steps = (s32[]) while(%first), condition=%more, body=%step, backend_config={"known_init_step":1}
  %eight = (s32[]) while(%first), condition=%more, body=%step, backend_config={"known_trip_count":{"n":"8"}}
}
"""  # noqa: E501


def test_figures(tmp_path):
    (tmp_path / "m.1.thunk_sequence_after_thunk_passes.txt").write_text(THUNKS)
    (tmp_path / "m.1.sm_8.0_gpu_after_optimizations.txt").write_text(HLO)
    (tmp_path / "m.1.sm_8.0_gpu_after_optimizations-buffer-assignment.txt").write_text("")
    (tmp_path / "n.thunk_sequence_after_thunk_passes.txt").write_text("")
    assert figures(*read_dump(tmp_path), weights=[(64, 32)], cores=108) == {
        "graphs": 2,
        "host_conditions": 1,
        "host_loops": 2,
        "open_loops": 1,
        "graph_kernels": 7,
        "loose_kernels": 3,
        "loops": [[1, 7], [2, 2]],
        "products": 4,
        # Of one row, with few blocks, and by matrix units; neither squares nor in the inner loop.
        "small_products": 2,
        "float32_weights": 1,
        "copied_weights": 1,
    }


WORK = """HloModule step

%fused_dot (parameter_0: bf16[8,64], parameter_1: bf16[256,64]) -> f32[8,256] {
  %parameter_0 = bf16[8,64]{1,0} parameter(0)
  %parameter_1 = s8[256,64]{1,0} parameter(1)
  %convert.1 = bf16[256,64]{1,0} convert(%parameter_1)
  ROOT %dot.1 = f32[8,256]{1,0} dot(%parameter_0, %convert.1), lhs_contracting_dims={1}, rhs_contracting_dims={1}
}

%fused_reduce (parameter_0: s8[256,64], parameter_1: bf16[64]) -> f32[256] {
  %parameter_0 = s8[256,64]{1,0} parameter(0)
  %parameter_1 = bf16[64]{0} parameter(1)
  %multiply.1 = f32[256,64]{1,0} multiply(%broadcast.1, %convert.1)
  ROOT %reduce.1 = f32[256]{0} reduce(%multiply.1, %zero), dimensions={1}, to_apply=%add, metadata={op_name="jit(step)/product/dot_general"}
}

%body (rows: bf16[8,64]) -> f32[8,256] {
  %one_row = f32[256]{0} fusion(%bytes, %row), kind=kInput, calls=%fused_reduce
  %rows = bf16[8,64]{1,0} parameter(0)
  %weights = bf16[256,64]{1,0} parameter(1)
  %first = f32[8,256]{1,0} fusion(%rows, %weights), kind=kCustom, calls=%fused_dot
  %attended = (f32[4,1,2,16,32]{4,3,2,1,0}) custom-call(%length, %q, %k, %v), custom_call_target="__gpu$xla.gpu.triton", operand_layout_constraints={s32[1]{0}, bf16[1,3,8,32]{3,2,1,0}, bf16[1,2,100,32]{3,2,1,0}, bf16[1,2,100,32]{3,2,1,0}}, metadata={op_name="jit(step)/tsjax_tree_attention/pallas_call"}
  %merged = f32[3,8,32]{2,1,0} custom-call(%attended), custom_call_target="__gpu$xla.gpu.triton", operand_layout_constraints={f32[4]{0}}, metadata={op_name="jit(step)/tsjax_tree_attention_merge/pallas_call"}
  ROOT %second = f32[8,256]{1,0} fusion(%rows, %weights), kind=kCustom, calls=%fused_dot
}

ENTRY %main (rows: bf16[8,64]) -> f32[8,256] {
  %rows = bf16[8,64]{1,0} parameter(0)
  ROOT %loop = f32[8,256]{1,0} while(%rows), condition=%condition, body=%body
}
"""  # noqa: E501


def test_work_is_counted_where_kernels_start():
    """A product that two fusions share counts twice, its body by itself not at all."""
    assert work(WORK) == {
        "weights": (2 + 1) * 256 * 64,  # of two fusions and of one row, all in int8
        "products": (2 * 2 * 8 + 2) * 256 * 64,
        "cache": 2 * 2 * 2 * 100 * 32,  # keys and values of two heads, in two bytes
        "attention": 2 * 2 * 3 * 8 * 100 * 32,  # q·k and the sum of values, of 8 query heads
        "kernels": 5,
    }


SENDING = """
HloModule jit_decode

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%a, %b)
}

%chosen (x: f32[8]) -> f32[8] {
  ROOT %gathered = f32[4,8]{1,0} all-gather(%x), channel_id=4, dimensions={0}
}

%inner (x: f32[8]) -> f32[8] {
  ROOT %moved = f32[8]{0} collective-permute(%x), channel_id=3, source_target_pairs={{0,1}}
}

%body (x: f32[8]) -> f32[8] {
  %two = (f32[2,3]{1,0}, bf16[5]{0}) all-reduce(%a, %b), channel_id=1, to_apply=%add
  %begun = (f32[2]{0}, f32[8]{0}) all-gather-start(%c), channel_id=2, dimensions={0}
  %done = f32[8]{0} all-gather-done(%begun)
  %looped = f32[8]{0} while(%x), condition=%always, body=%inner
  ROOT %either = f32[8]{0} conditional(%p, %x, %x), branch_computations={%chosen, %none}
}

ENTRY %main (x: f32[8]) -> f32[8] {
  ROOT %steps = f32[8]{0} while(%x), condition=%always, body=%body
}
"""


def test_what_is_sent():
    """A usual step is what the outermost loop does itself, neither inner loops nor conditions."""
    found = sent(SENDING)
    each = {(one["name"], one["bytes"], tuple(one["inside"])) for one in found["each"]}
    assert each == {
        ("all-reduce", 2 * 3 * 4 + 5 * 2, ("loop",)),
        ("all-gather", 32, ("loop",)),
        ("collective-permute", 32, ("loop", "loop")),
        ("all-gather", 128, ("loop", "condition")),
    }
    assert (found["step"], found["step_count"]) == (34 + 32, 2)
    assert sent("ENTRY %main (x: f32[8]) -> f32[8] {\n}")["step"] == 0

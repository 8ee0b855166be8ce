"""The shader of the matrix product, as text.  [core]

A workgroup of 8 x 8 invocations computes a tile of 64 x 64 of the result, each invocation 8 x 8 of it, which are 8 rows
and 8 columns apart. Operands are read by their strides, so a transposed one needs no copy, and K goes through shared
memory 16 at a time. Everything but the loops over K is written out: some drivers count the turns of all loops together
and stop at 65,535. With K at most 16,384 there are 17,408.
"""

from worker_agent.portable.gemm_plan import TILE

_SIDE = 8
"""Invocations along each side of a workgroup, and elements of the result along each side of an invocation's part."""
_DEPTH = 16
"""How much of K is in shared memory at a time."""
PARAMETERS_BYTES = 64
"""Size of the uniform `p`."""

_HEAD = f"""
struct Parameters {{
  m: u32, n: u32, k: u32, accumulate: u32,
  a_z: u32, a_m: u32, a_k: u32, a_at: u32,
  b_z: u32, b_k: u32, b_n: u32, b_at: u32,
  c_z: u32, unused_1: u32, unused_2: u32, unused_3: u32,
}}
@group(0) @binding(0) var<storage, read> a: array<f32>;
@group(0) @binding(1) var<storage, read> b: array<f32>;
@group(0) @binding(2) var<storage, read_write> c: array<f32>;
@group(0) @binding(3) var<uniform> p: Parameters;
var<workgroup> tile_a: array<f32, {TILE * _DEPTH}>;
var<workgroup> tile_b: array<f32, {TILE * _DEPTH}>;

fn load_a(z: u32, row: u32, at: u32) -> f32 {{
  if (row < p.m && at < p.k) {{ return a[p.a_at + z * p.a_z + row * p.a_m + at * p.a_k]; }}
  return 0.0;
}}
fn load_b(z: u32, at: u32, column: u32) -> f32 {{
  if (column < p.n && at < p.k) {{ return b[p.b_at + z * p.b_z + at * p.b_k + column * p.b_n]; }}
  return 0.0;
}}
fn store(z: u32, row: u32, column: u32, value: f32) {{
  if (row < p.m && column < p.n) {{
    let at = z * p.c_z + row * p.n + column;
    if (p.accumulate == 1u) {{ c[at] = c[at] + value; }} else {{ c[at] = value; }}
  }}
}}

@compute @workgroup_size({_SIDE}, {_SIDE}, 1)
fn multiply(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) own: vec3<u32>) {{
  let row = group.y * {TILE}u + own.y;
  let column = group.x * {TILE}u + own.x;
  let index = own.y * {_SIDE}u + own.x;
"""


def source() -> str:
    """Returns the shader in WGSL; its entry point is `multiply`."""
    sums = [f"  var c{i}{j} = 0.0;" for i in range(_SIDE) for j in range(_SIDE)]
    products = [f"      c{i}{j} = fma(a{i}, b{j}, c{i}{j});" for i in range(_SIDE) for j in range(_SIDE)]
    stores = [
        f"  store(group.z, row + {i * _SIDE}u, column + {j * _SIDE}u, c{i}{j});"
        for i in range(_SIDE)
        for j in range(_SIDE)
    ]
    lines = [
        *sums,
        f"  for (var at = 0u; at < p.k; at = at + {_DEPTH}u) {{",
        *_loads(),
        "    workgroupBarrier();",
        f"    for (var i = 0u; i < {_DEPTH}u; i = i + 1u) {{",
        *(f"      let a{i} = tile_a[i * {TILE}u + own.y + {i * _SIDE}u];" for i in range(_SIDE)),
        *(f"      let b{j} = tile_b[i * {TILE}u + own.x + {j * _SIDE}u];" for j in range(_SIDE)),
        *products,
        "    }",
        "    workgroupBarrier();",
        "  }",
        *stores,
        "}",
    ]
    return _HEAD + "\n".join(lines) + "\n"


def _loads() -> list[str]:
    """One invocation loads one row of the left tile and one column of the right one, all of their depth."""
    rows = [
        f"    tile_a[{i * TILE}u + index] = load_a(group.z, group.y * {TILE}u + index, at + {i}u);"
        for i in range(_DEPTH)
    ]
    columns = [
        f"    tile_b[{i * TILE}u + index] = load_b(group.z, at + {i}u, group.x * {TILE}u + index);"
        for i in range(_DEPTH)
    ]
    return rows + columns

"""The names of element types: the proxy protocol's, NumPy's and MLIR's."""

from __future__ import annotations

_ROWS = """
    PRED bool i1
    S2 int2 i2
    S4 int4 i4
    S8 int8 i8
    S16 int16 i16
    S32 int32 i32
    S64 int64 i64
    U2 uint2 ui2
    U4 uint4 ui4
    U8 uint8 ui8
    U16 uint16 ui16
    U32 uint32 ui32
    U64 uint64 ui64
    F16 float16 f16
    F32 float32 f32
    F64 float64 f64
    BF16 bfloat16 bf16
    C64 complex64 complex<f32>
    C128 complex128 complex<f64>
    F8E3M4 float8_e3m4 f8E3M4
    F8E4M3 float8_e4m3 f8E4M3
    F8E4M3FN float8_e4m3fn f8E4M3FN
    F8E4M3B11FNUZ float8_e4m3b11fnuz f8E4M3B11FNUZ
    F8E4M3FNUZ float8_e4m3fnuz f8E4M3FNUZ
    F8E5M2 float8_e5m2 f8E5M2
    F8E5M2FNUZ float8_e5m2fnuz f8E5M2FNUZ
    F8E8M0FNU float8_e8m0fnu f8E8M0FNU
    F4E2M1FN float4_e2m1fn f4E2M1FN
"""
ROWS = [tuple(row.split()) for row in _ROWS.strip().splitlines()]
NUMPY_OF_KIND = {f"KIND_{kind}": numpy for kind, numpy, _ in ROWS}
KIND_OF_NUMPY = {numpy: f"KIND_{kind}" for kind, numpy, _ in ROWS}
NUMPY_OF_MLIR = {mlir: numpy for _, numpy, mlir in ROWS}

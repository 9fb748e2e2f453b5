"""Mangled names: known answers (of c++filt, where it knows them), names made with their answer, and any text at all."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from flopwise.work.demangle import LONGEST, demangled, demangled_names
from flopwise.work.kernel_class import classify
from flopwise.work.kernel_signature import signature
from flopwise.work.mangled import LONGEST_TEXT
from flopwise.work.operation import CLASSES

KNOWN = {
    "_Z4gemmPfPKfi": "gemm(float*, float const*, int)",
    "_ZN5aiter32fmha_fwd_hd192_hd128_bf16_causalE": "aiter::fmha_fwd_hd192_hd128_bf16_causal",
    "_ZN5aiter24add_rmsnorm_quant_kernelIDF16bDF16bLi64ELi8ELb0ELb0ELb1ELi1EEEvPT0_PT_PfS4_S4_S4_diiiiiiib": (
        "void aiter::add_rmsnorm_quant_kernel<__bf16, __bf16, 64, 8, false, false, true, 1>(__bf16*, __bf16*, float*, __bf16*, "
        "__bf16*, __bf16*, double, int, int, int, int, int, int, int, bool)"
    ),
    "_ZN7sgl_hip10activation18act_and_mul_kernelI14__hip_bfloat16TnPFT_RKS3_EXadL_Z4siluIS2_ES3_S5_EEEEvPS3_PS4_i": (
        "void sgl_hip::activation::act_and_mul_kernel<__hip_bfloat16, &(__hip_bfloat16 silu<__hip_bfloat16>(__hip_bfloat16 "
        "const&))>(__hip_bfloat16*, __hip_bfloat16 const*, int)"
    ),
    "_ZN2at6native12_GLOBAL__N_129vectorized_elementwise_kernelILi4EZNS0_6launchIdEEvPT_EUlffE_St5arrayIPcLm3EEEEviT0_T1_": (
        "void at::native::(anonymous namespace)::vectorized_elementwise_kernel<4, at::native::launch<double>(double*)::"
        "{lambda(float, float)#1}, std::array<char*, 3ul> >(int, at::native::launch<double>(double*)::{lambda(float, float)#1}, "
        "std::array<char*, 3ul>)"
    ),
    "_ZL13mul_mat_vec_qIL9ggml_type12ELi1ELb0EEvPKvS2_PKiPf": (
        "void mul_mat_vec_q<(ggml_type)12, 1, false>(void const*, void const*, int const*, float*)"
    ),
    "_Z4kernIJ1SIL1E1ELb1ELj3ELln5ELi7EES0_ILS1_0ELb0ELj0ELl1ELs2EEEEvDpNT_6ParamsE": (
        "void kern<S<(E)1, true, 3u, -5l, 7>, S<(E)0, false, 0u, 1l, (short)2> >(S<(E)1, true, 3u, -5l, 7>::Params, "
        "S<(E)0, false, 0u, 1l, (short)2>::Params)"
    ),
    "_ZN4gloo10MakeStringIJA25_ctEEEvDpRKT_": (
        "void gloo::MakeString<char [25], unsigned short>(char const (&) [25], unsigned short const&)"
    ),
    "_Z3genIZZ4uservENKUlT_E0_clIdEEDaS0_EUlS0_E_EvS0_": (
        "void gen<user()::{lambda(auto:1)#2}::operator()<double>(double) const::{lambda(auto:1)#1}>(user()::"
        "{lambda(auto:1)#2}::operator()<double>(double) const::{lambda(auto:1)#1})"
    ),
    "_Z5applyPFvPKfiEM1SKFiiE": "apply(void (*)(float const*, int), int (S::*)(int) const)",
    "_ZN3fooIiEC1IfEET_": "foo<int>::foo<float>(float)",
    "_Z1fv.kd": "f()",
    "_Z1fi.constprop.0": "f(int) [clone .constprop.0]",
}
UNREADABLE = [
    "",
    "_Z",
    "_ZN5cut_short",
    "_ZTV3foo",
    "_Z1fS9_",
    "_Z1fT_",
    "gemm",
    "__Z1fv",
    "_Z9999999f",
    "_ZN",
    "_ZE",
    "_Z3abcI",
]


@pytest.mark.parametrize(("mangled", "text"), KNOWN.items())
def test_known_answers(mangled, text):
    assert demangled(mangled) == text


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_cannot_be_read_stays(name):
    assert demangled(name) == name


# Names with their answers: a function template of types made of each other, without abbreviations.

_NAMES = st.from_regex(r"[a-z][a-z_]{0,8}", fullmatch=True)
_BUILTINS = st.sampled_from([("f", "float"), ("i", "int"), ("b", "bool"), ("DF16b", "__bf16"), ("h", "unsigned char")])


def _named(name):
    return st.just((f"{len(name)}{name}", name))


def _qualified(parts):
    names, (code, text) = parts
    if len(names) == 1:
        return f"{names[0][0]}I{code}E", f"{names[0][1]}<{text}{' ' if text.endswith('>') else ''}>"
    inner = "".join(code for code, _ in names)
    path = "::".join(text for _, text in names)
    return f"N{inner}I{code}EE", f"{path}<{text}{' ' if text.endswith('>') else ''}>"


_TYPES = st.recursive(
    _BUILTINS,
    lambda inner: st.one_of(
        inner.map(lambda one: (f"P{one[0]}", f"{one[1]}*")),
        inner.filter(lambda one: not one[0].startswith("K")).map(lambda one: (f"K{one[0]}", f"{one[1]} const")),
        st.tuples(st.lists(_NAMES.flatmap(_named), min_size=1, max_size=3), inner).map(_qualified),
    ),
    max_leaves=4,
)


@given(_NAMES, _NAMES, st.lists(_TYPES, min_size=1, max_size=3), st.integers(-9999, 9999), st.booleans())
def test_a_name_made_with_its_answer(space, own, types, number, flag):
    literal = f"Li{'n' if number < 0 else ''}{abs(number)}E" + f"Lb{int(flag)}E"
    mangled = f"_ZN{len(space)}{space}{len(own)}{own}I{literal}Ev{''.join(code for code, _ in types)}"
    mangled = mangled.replace("Ev", "EEv", 1)
    parameters = ", ".join(text for _, text in types)
    assert demangled(mangled) == f"void {space}::{own}<{number}, {str(flag).lower()}>({parameters})"
    assert signature(mangled)[:2] == (own, space)


_CODES = "_Z N E I J L X S_ S0_ St T_ T0_ Dp DF16b K P R F A3_ Ul Z Li4E Lb1E 3foo 12_GLOBAL__N_1 i f v 9"
_PARTS = st.sampled_from(_CODES.split())


@given(st.one_of(st.text(max_size=200), st.lists(_PARTS, max_size=60).map("".join)))
@example("S_" * 2000)
@example("N" * 2000)
@example("P" * 4000)
@example("1a" + "I" * 500)
@example("1fIJ" + "S_" * 500)
def test_any_text_after_the_prefix_is_a_name_of_bounded_length(text):
    shown = demangled(f"_Z{text}")
    assert len(shown) <= max(LONGEST_TEXT + LONGEST, len(text) + 2)
    assert classify(f"_Z{text}") in CLASSES


@given(st.sampled_from(sorted(KNOWN)), st.data())
def test_a_name_cut_or_changed_is_still_some_name(name, data):
    cut = data.draw(st.integers(0, len(name)))
    with_other = name[:cut] + data.draw(_PARTS) + name[cut + data.draw(st.integers(0, 3)) :]
    for changed in (name[:cut], with_other):
        assert isinstance(demangled(changed), str)
        assert classify(changed) in CLASSES


def test_doubling_again_and_again_is_refused():
    """Each argument is a pair of the one before: 2**18 words."""
    letters = zip("bcdefghijklmnopqrs", "13579BDFHJLNPRTVXZ", strict=True)
    pairs = (f"1{letter}IS{before}_S{before}_E" for letter, before in letters)
    name = f"_Z1fI1aIiiE{''.join(pairs)}Ev"
    assert demangled(name) == name


def test_a_trace_of_nothing_but_long_mangled_names_is_not_read_in_full():
    names = [f"_ZN5aiter1{number % 10}{'f' * 1000}" for number in range(5000)]
    assert demangled_names([*names, "_Z1fv"])[-1] == "_Z1fv"
    assert demangled_names(["_Z1fv", *names])[0] == "f()"

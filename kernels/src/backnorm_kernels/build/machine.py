"""Compile LLVM code to object code for a level of processors (`levels`)."""

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm

from backnorm_kernels.levels import LEVELS


def target_machine(level: str) -> Any:
    """Return LLVM's target machine for `level`, or for this processor if `LEVELS` lacks `level`."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    llvm.initialize_native_asmparser()
    if level in LEVELS:
        cpu = LEVELS[level].processor
        features = ",".join(f"+{name}" for name in LEVELS[level].features)
    else:
        cpu, features = llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()
    target = llvm.Target.from_triple(llvm.get_process_triple())
    # Shared libraries need position-independent code. The code model "small" is chosen explicitly,
    # because llvmlite's default is "large", which is meant for just-in-time compilers.
    options = {"opt": 3, "reloc": "pic", "codemodel": "small"}
    return target.create_target_machine(cpu=cpu, features=features, **options)


def optimised(module: Any, machine: Any) -> Any:
    """Change a module in place: remove unused code, and optimise without LLVM's vectorisers."""
    module.verify()
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    options.loop_vectorization = options.slp_vectorization = False
    builder = llvm.create_pass_builder(machine, options)
    needed = llvm.create_new_module_pass_manager()
    needed.add_global_dead_code_eliminate_pass()
    needed.run(module, builder)
    builder.getModulePassManager().run(module, builder)
    return module


def object_of(module: Any, machine: Any) -> bytes:
    """Return the object code of an optimised module.

    Raises
    ------
    RuntimeError
        If the code could raise a Python error, which would be lost.
    """
    raising = [v.name for v in module.global_variables if "picklebuf" in v.name]
    if raising:
        raise RuntimeError(f"a kernel can raise an error: {raising}")
    code: bytes = machine.emit_object(module)
    return code


def probe() -> str:
    """Return LLVM code that queries an x86-64 processor's features; "" for other processors."""
    if not llvm.get_process_triple().startswith("x86_64"):
        return ""
    return """
define void @bn_cpuid(i32 %leaf, i32 %subleaf, ptr %answer) {
  %found = call { i32, i32, i32, i32 } asm sideeffect "cpuid",
    "={ax},={bx},={cx},={dx},{ax},{cx},~{dirflag},~{fpsr},~{flags}"(i32 %leaf, i32 %subleaf)
  %a = extractvalue { i32, i32, i32, i32 } %found, 0
  %b = extractvalue { i32, i32, i32, i32 } %found, 1
  %c = extractvalue { i32, i32, i32, i32 } %found, 2
  %d = extractvalue { i32, i32, i32, i32 } %found, 3
  store i32 %a, ptr %answer
  %at_b = getelementptr i32, ptr %answer, i64 1
  store i32 %b, ptr %at_b
  %at_c = getelementptr i32, ptr %answer, i64 2
  store i32 %c, ptr %at_c
  %at_d = getelementptr i32, ptr %answer, i64 3
  store i32 %d, ptr %at_d
  ret void
}
define i64 @bn_xgetbv() {
  %found = call { i32, i32 } asm sideeffect "xgetbv",
    "={ax},={dx},{cx},~{dirflag},~{fpsr},~{flags}"(i32 0)
  %low = extractvalue { i32, i32 } %found, 0
  %high = extractvalue { i32, i32 } %found, 1
  %l = zext i32 %low to i64
  %h = zext i32 %high to i64
  %moved = shl i64 %h, 32
  %all = or i64 %moved, %l
  ret i64 %all
}
"""

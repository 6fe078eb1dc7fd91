"""Code objects (`.co`, `.hsaco`) as programs: ELF, metadata and descriptor read here, text by
llvm-objdump. May import `emulator.program`."""

"""The argument order of every kernel: one module per backend, and nothing else knows it. May
import `launch.spec`."""

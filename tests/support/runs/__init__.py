"""Ways to run a problem: public functions, the interpreter, a stand-in for a GPU, ranks of a
mesh."""

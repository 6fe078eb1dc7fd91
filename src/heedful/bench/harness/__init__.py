"""The parts that every benchmark uses: cases, peers, checks, timing, reports. Imports nothing else
of `bench`."""

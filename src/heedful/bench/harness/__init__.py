"""What every benchmark stands on: cases, peers, checks, timing, reports. Imports nothing else of
`bench`."""

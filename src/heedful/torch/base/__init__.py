"""torch's arrays, devices, dispatcher and threads, as the rest sees them. Imports nothing else of
`heedful.torch`."""

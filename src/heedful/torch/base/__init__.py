"""torch's arrays, devices, dispatcher and threads, for the other folders. Imports nothing else of
`heedful.torch`."""

"""Devices, dispatcher, threads and gradients of torch, as the other folders ask for them."""

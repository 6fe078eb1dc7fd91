"""`heedful.integrations.vllm`, beside a stand-in for vLLM."""

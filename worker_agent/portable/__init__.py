"""GPUs of any maker, behind the one name `wgpu`."""

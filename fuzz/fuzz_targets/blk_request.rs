#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| vshunt_fuzz::blk_request(data));

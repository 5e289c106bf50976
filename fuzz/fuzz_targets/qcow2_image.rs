#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| vshunt_fuzz::qcow2_image(data));

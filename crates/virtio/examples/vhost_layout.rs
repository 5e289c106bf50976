//! Prints `virtio::vhost` as assertions in C, which a compiler checks against the kernel's headers:
//!
//! cargo run -p virtio --example vhost_layout | cc -fsyntax-only -x c -I
//! kmod/vhost_blk/include/uapi -

use std::mem::{offset_of, size_of};

use virtio::vhost::*;

fn assert_c(left: &str, right: usize) {
    println!("_Static_assert(({left}) == {right}UL, \"{left} is {right} in Rust\");");
}

fn field_size<T, F>(_: fn(&T) -> &F) -> usize {
    size_of::<F>()
}

macro_rules! compare {
    ($c:literal, $type:ty, $($field:ident),+) => {
        assert_c(concat!("sizeof(struct ", $c, ")"), size_of::<$type>());
        $(
            let (c, field) = ($c, stringify!($field));
            assert_c(&format!("__builtin_offsetof(struct {c}, {field})"), offset_of!($type, $field));
            assert_c(&format!("sizeof(((struct {c} *)0)->{field})"), field_size(|t: &$type| &t.$field));
        )+
    };
}

macro_rules! numbers {
    ($($name:ident),+ $(,)?) => { $( assert_c(stringify!($name), $name as usize); )+ };
}

fn main() {
    println!("#include <linux/vhost_blk.h>");
    compare!("vhost_vring_state", VringState, index, num);
    compare!("vhost_vring_file", VringFile, index, fd);
    compare!(
        "vhost_vring_addr",
        VringAddr,
        index,
        flags,
        desc_user_addr,
        used_user_addr,
        avail_user_addr,
        log_guest_addr
    );
    compare!(
        "vhost_memory_region",
        MemoryRegion,
        guest_phys_addr,
        memory_size,
        userspace_addr,
        flags_padding
    );
    compare!("vhost_memory", MemoryHeader, nregions, padding);
    compare!("vhost_blk_backend", BlkBackend, size, flags, fd, reserved, serial, reserved2);
    compare!(
        "vhost_blk_vring_stats",
        BlkVringStats,
        size,
        index,
        in_flight,
        running,
        requests,
        errors,
        unsupported,
        read_bytes,
        written_bytes,
        kicks,
        signals
    );
    compare!(
        "vhost_blk_vring_inflight",
        BlkVringInflight,
        size,
        index,
        region_user_addr,
        counter,
        replay_user_addr,
        num,
        last_batch_head,
        replay_num,
        reserved
    );
    numbers!(
        VHOST_GET_FEATURES,
        VHOST_SET_FEATURES,
        VHOST_SET_OWNER,
        VHOST_RESET_OWNER,
        VHOST_SET_MEM_TABLE,
        VHOST_SET_LOG_BASE,
        VHOST_SET_LOG_FD,
        VHOST_SET_VRING_NUM,
        VHOST_SET_VRING_ADDR,
        VHOST_SET_VRING_BASE,
        VHOST_GET_VRING_BASE,
        VHOST_SET_VRING_KICK,
        VHOST_SET_VRING_CALL,
        VHOST_SET_VRING_ERR,
        VHOST_SET_VRING_BUSYLOOP_TIMEOUT,
        VHOST_NET_SET_BACKEND,
        VHOST_BLK_SET_BACKEND,
        VHOST_BLK_SET_VRING,
        VHOST_BLK_GET_VRING_STATS,
        VHOST_BLK_SET_VRING_INFLIGHT,
        VHOST_BLK_VRINGS_MAX,
        VHOST_BLK_VRING_NUM_MAX,
        VHOST_BLK_SERIAL_BYTES,
        VHOST_BLK_BACKEND_READONLY,
        VHOST_VRING_F_LOG,
        VHOST_PAGE_SIZE,
    );
    // Headers older than Linux 6.5 lack the workers.
    println!("#ifdef VHOST_NEW_WORKER");
    compare!("vhost_worker_state", WorkerState, worker_id);
    compare!("vhost_vring_worker", VringWorker, index, worker_id);
    numbers!(VHOST_NEW_WORKER, VHOST_FREE_WORKER, VHOST_ATTACH_VRING_WORKER, VHOST_GET_VRING_WORKER);
    println!("#endif");
    println!("#ifdef VHOST_SET_FORK_FROM_OWNER");
    numbers!(VHOST_SET_FORK_FROM_OWNER);
    println!("#endif");
}

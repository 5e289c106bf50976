//! Programs that choose the queue of a frame instead of the kernel's flow table: eBPF programs for
//! TUNSETSTEERINGEBPF.
//!
//! The kernel runs the program for each frame that it sends out of the interface. It takes the
//! lower 16 bits of the result modulo the number of attached queues, so a detached queue gets no
//! frames. The programs are socket filters, so they read the frame by LD_ABS and LD_IND. A program
//! that loads beyond the frame's end returns 0.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use vshunt_types::error::Error;
pub use vshunt_types::spec::Steering;

use vshunt_types::convert::{halves, len_u32, low_u16};

/// The type of a socket filter. The numbers are those of `<linux/bpf.h>`.
const PROG_TYPE_SOCKET_FILTER: u32 = 1;
const BPF_PROG_LOAD: libc::c_int = 5;
const FUNC_GET_SMP_PROCESSOR_ID: i32 = 8;
/// Offset of `hash` in struct __sk_buff.
const SKB_HASH: i16 = 68;

const ETH_P_IP: i32 = 0x0800;
const ETH_P_IPV6: i32 = 0x86DD;
const ETH_P_8021Q: i32 = 0x8100;
/// Bytes of an Ethernet header, and of the tag that may follow it.
const ETH_BYTES: i32 = 14;
const TAG_BYTES: i32 = 4;
const IPV6_BYTES: i32 = 40;
/// Protocols whose headers start with two ports: TCP, UDP, SCTP.
const WITH_PORTS: [i32; 3] = [6, 17, 132];
/// Mask of more fragments, or a fragment's offset (RFC 791).
const FRAGMENT: i32 = 0x3FFF;

/// Odd factors with bits in all positions.
const SPREAD: [u64; 2] = [0x9E37_79B9_7F4A_7C15, 0xD6E8_FEB8_6659_FD93];
const STEP: i32 = 0x0100_0193;

/// One instruction (struct bpf_insn).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Insn {
    code: u8,
    regs: u8,
    off: i16,
    imm: i32,
}

// Classes, sizes, modes and operations, combined and named as in the kernel.
const LD_IMM64: u8 = 0x18;
const LD_ABS: u8 = 0x20;
const LD_IND: u8 = 0x40;
const LDX_W: u8 = 0x61;
const LDX_DW: u8 = 0x79;
const STX_DW: u8 = 0x7B;
const ADD_K: u8 = 0x07;
const ADD_X: u8 = 0x0F;
const MUL_K: u8 = 0x27;
const MUL_X: u8 = 0x2F;
const AND_K: u8 = 0x57;
const LSH_K: u8 = 0x67;
const RSH_K: u8 = 0x77;
const XOR_X: u8 = 0xAF;
const MOV_K: u8 = 0xB7;
const MOV_X: u8 = 0xBF;
const JA: u8 = 0x05;
const JEQ_K: u8 = 0x15;
const JNE_K: u8 = 0x55;
const CALL: u8 = 0x85;
const EXIT: u8 = 0x95;

/// The size of a load by LD_ABS and LD_IND, in network order.
#[derive(Clone, Copy)]
enum Load {
    Word = 0x00,
    Half = 0x08,
    Byte = 0x10,
}

/// Registers. Loads of the frame need the context in R6, and overwrite R1 to R5.
const R0: u8 = 0;
const R1: u8 = 1;
const R2: u8 = 2;
const CONTEXT: u8 = 6;
/// The offset of the current header, from the frame's start.
const AT: u8 = 7;
/// The combined differences and sums of both ends, which are the same for both directions.
const XORED: u8 = 8;
const SUMMED: u8 = 9;
const STACK: u8 = 10;

/// The targets of jumps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Label {
    Parse,
    NoTag,
    V4,
    V4Ports,
    V6,
    V6Ports,
    Ports,
    Mix,
}

/// A program under construction.
#[derive(Default)]
struct Program {
    code: Vec<Insn>,
    jumps: Vec<(usize, Label)>,
    labels: Vec<(Label, usize)>,
}

impl Program {
    fn op(&mut self, code: u8, dst: u8, src: u8, off: i16, imm: i32) {
        let regs = if cfg!(target_endian = "little") { src << 4 | dst } else { dst << 4 | src };
        self.code.push(Insn { code, regs, off, imm });
    }

    fn k(&mut self, code: u8, dst: u8, imm: i32) {
        self.op(code, dst, 0, 0, imm);
    }

    fn x(&mut self, code: u8, dst: u8, src: u8) {
        self.op(code, dst, src, 0, 0);
    }

    /// Loads the frame's value at offset `at` into R0.
    fn frame(&mut self, load: Load, at: i32) {
        self.k(LD_ABS | load as u8, R0, at);
    }

    /// Loads the current header's value at offset `at` into R0.
    fn header(&mut self, load: Load, at: i32) {
        self.op(LD_IND | load as u8, R0, AT, 0, at);
    }

    /// Multiplies by a factor that does not fit into another instruction. R1 is overwritten.
    fn spread(&mut self, dst: u8, by: u64) {
        let [low, high] = halves(by);
        self.k(LD_IMM64, R1, low);
        self.k(0, 0, high);
        self.x(MUL_X, dst, R1);
    }

    /// Jumps to `label` if `code` holds for R0 and `imm`.
    fn jump(&mut self, code: u8, imm: i32, label: Label) {
        self.jumps.push((self.code.len(), label));
        self.k(code, R0, imm);
    }

    fn label(&mut self, label: Label) {
        self.labels.push((label, self.code.len()));
    }

    fn done(mut self) -> Vec<Insn> {
        for (from, label) in self.jumps {
            let (_, to) = self.labels.iter().find(|(l, _)| *l == label).expect("each label is set");
            if let Some(jump) = self.code.get_mut(from) {
                jump.off = low_u16(to.wrapping_sub(from + 1) as u64).cast_signed();
            }
        }
        self.code
    }

    /// Combines the numbers of both ends, independently of their order.
    fn both(&mut self, load: Load, [one, other]: [i32; 2], from: fn(&mut Self, Load, i32)) {
        from(self, load, one);
        self.op(STX_DW, STACK, R0, -8, 0);
        from(self, load, other);
        self.op(LDX_DW, R1, STACK, -8, 0);
        self.x(MOV_X, R2, R0);
        self.x(ADD_X, R2, R1);
        self.x(XOR_X, R0, R1);
        for (sum, with) in [(XORED, R0), (SUMMED, R2)] {
            self.k(MUL_K, sum, STEP);
            self.x(ADD_X, sum, with);
        }
    }

    /// Jumps to `ports` for a protocol with ports. All others use only addresses.
    fn protocols(&mut self, at: i32, ports: Label) {
        self.header(Load::Byte, at);
        for protocol in WITH_PORTS {
            self.jump(JEQ_K, protocol, ports);
        }
        self.jump(JA, 0, Label::Mix);
    }

    /// Computes a hash over addresses and ports, which is the same for both directions of a flow.
    /// Fragments, and protocols without ports, use only addresses. Frames that are not IP use the
    /// Ethernet addresses.
    fn flow_hash(&mut self) {
        for register in [XORED, SUMMED] {
            self.k(MOV_K, register, 0);
        }
        self.k(MOV_K, AT, ETH_BYTES);
        self.frame(Load::Half, ETH_BYTES - 2);
        self.jump(JNE_K, ETH_P_8021Q, Label::NoTag);
        self.k(ADD_K, AT, TAG_BYTES);
        self.header(Load::Half, -2);
        self.label(Label::NoTag);
        self.jump(JEQ_K, ETH_P_IP, Label::V4);
        self.jump(JEQ_K, ETH_P_IPV6, Label::V6);
        self.both(Load::Word, [2, 8], Self::frame);
        self.jump(JA, 0, Label::Mix);

        self.label(Label::V4);
        self.both(Load::Word, [12, 16], Self::header);
        self.header(Load::Half, 6);
        self.k(AND_K, R0, FRAGMENT);
        self.jump(JNE_K, 0, Label::Mix);
        self.protocols(9, Label::V4Ports);
        self.label(Label::V4Ports);
        self.header(Load::Byte, 0);
        self.k(AND_K, R0, 0x0F);
        self.k(LSH_K, R0, 2);
        self.x(ADD_X, AT, R0);
        self.jump(JA, 0, Label::Ports);

        self.label(Label::V6);
        for word in 0..4 {
            self.both(Load::Word, [8 + 4 * word, 24 + 4 * word], Self::header);
        }
        self.protocols(6, Label::V6Ports);
        self.label(Label::V6Ports);
        self.k(ADD_K, AT, IPV6_BYTES);

        self.label(Label::Ports);
        self.both(Load::Half, [0, 2], Self::header);

        self.label(Label::Mix);
        self.spread(XORED, SPREAD[0]);
        self.spread(SUMMED, SPREAD[1]);
        self.x(MOV_X, R0, XORED);
        self.k(RSH_K, R0, 32);
        self.x(XOR_X, R0, SUMMED);
        self.x(XOR_X, R0, XORED);
        self.spread(R0, SPREAD[0]);
        self.k(RSH_K, R0, 48);
        self.k(EXIT, 0, 0);
    }
}

/// Returns the program for a kind of steering. `None` if the kernel does it.
fn program(steering: Steering) -> Option<Vec<Insn>> {
    let mut program = Program::default();
    match steering {
        Steering::Auto => return None,
        Steering::Cpu => {
            program.k(CALL, 0, FUNC_GET_SMP_PROCESSOR_ID);
            program.k(EXIT, 0, 0);
        }
        Steering::Rss => {
            program.x(MOV_X, CONTEXT, R1);
            program.flow_hash();
        }
        Steering::Hash => {
            program.x(MOV_X, CONTEXT, R1);
            program.op(LDX_W, R0, CONTEXT, SKB_HASH, 0);
            program.jump(JEQ_K, 0, Label::Parse);
            program.k(EXIT, 0, 0);
            program.label(Label::Parse);
            program.flow_hash();
        }
    }
    Some(program.done())
}

/// Loads the program for a kind of steering. `None` if the kernel does it.
pub(super) fn load(steering: Steering) -> io::Result<Option<OwnedFd>> {
    program(steering).map(|code| load_program(&code)).transpose()
}

/// Loads a program that always returns the same queue.
#[cfg(test)]
pub(super) fn load_constant(queue: u16) -> io::Result<OwnedFd> {
    let mut program = Program::default();
    program.k(MOV_K, R0, queue.into());
    program.k(EXIT, 0, 0);
    load_program(&program.done())
}

/// The first fields of union bpf_attr, as BPF_PROG_LOAD uses them.
#[repr(C)]
struct LoadAttr {
    prog_type: u32,
    insn_cnt: u32,
    insns: u64,
    license: u64,
    log_level: u32,
    log_size: u32,
    log_buf: u64,
    kern_version: u32,
    prog_flags: u32,
    prog_name: [u8; 16],
}

fn load_program(code: &[Insn]) -> io::Result<OwnedFd> {
    let mut prog_name = [0; 16];
    prog_name[..7].copy_from_slice(b"vs_tapq");
    let attr = LoadAttr {
        prog_type: PROG_TYPE_SOCKET_FILTER,
        insn_cnt: len_u32(code.len()),
        insns: code.as_ptr() as u64,
        // It calls no function that is only for GPL programs.
        license: c"MIT".as_ptr() as u64,
        log_level: 0,
        log_size: 0,
        log_buf: 0,
        kern_version: 0,
        prog_flags: 0,
        prog_name,
    };
    // SAFETY: the kernel reads the given number of bytes of `attr`, `insn_cnt` instructions with
    // the layout of struct bpf_insn, and a license that ends with a zero byte. All three outlive
    // the call.
    let fd = unsafe { libc::syscall(libc::SYS_bpf, BPF_PROG_LOAD, &raw const attr, size_of::<LoadAttr>()) };
    match libc::c_int::try_from(fd) {
        // SAFETY: the call returned a new descriptor (close-on-exec), which nothing else owns.
        Ok(fd @ 0..) => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Returns the argument of TUNSETSTEERINGEBPF: a program, or -1 to remove it.
pub(super) fn argument(program: Option<&OwnedFd>) -> libc::c_int {
    program.map_or(-1, AsRawFd::as_raw_fd)
}

/// Returns the error of a program that was not loaded, with the remedy.
pub(super) fn explain(steering: Steering, e: io::Error) -> Error {
    match e.raw_os_error() {
        Some(libc::EPERM) => Error::io(
            format!(
                "no permission to load the eBPF program of steering={steering}; run as root (CAP_BPF), or leave steering out"
            ),
            e,
        ),
        Some(libc::ENOSYS) => Error::unsupported(format!(
            "this kernel has no bpf(2) for steering={steering}; leave steering out"
        )),
        _ => Error::io(format!("the eBPF program of steering={steering} cannot be loaded"), e),
    }
}

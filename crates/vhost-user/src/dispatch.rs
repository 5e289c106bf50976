//! Checks the payload of each message of a front end, and calls the session or the device
//! (vhost-user specification, "Front-end message types"). Called by the session thread.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use vshunt_types::sync::Locked;

use vhost::vhost_user::message::{
    FrontendReq as Code, VhostUserConfigFlags, VhostUserInflight, VhostUserLog, VhostUserMemoryRegion,
    VhostUserMsgValidator, VhostUserSingleMemoryRegion, VhostUserVringAddrFlags,
};
use vhost::vhost_user::{
    Error, Result, VhostUserBackendReqHandlerMut, VhostUserProtocolFeatures as Protocol,
};

use super::memory::not_memory;
use super::messages::{Message, invalid};
use super::session::Session;
use super::{Inner, channel};
use vshunt_types::convert::low_u8;

/// Bytes of the configuration space that a front end may access at most.
const CONFIG_BYTES_MAX: u32 = 4096;
/// Bytes of one region in SET_MEM_TABLE.
const REGION_LEN: usize = 32;
/// Bytes of a memory table before its regions, and of the padding before a single region.
const REGIONS_AT: usize = 8;
/// Bytes of the header before bytes of the configuration space: an offset, a size and flags.
const CONFIG_HEADER_LEN: usize = 12;
/// Bytes of the description of an in-flight region: two numbers of 64 bits, two of 16 bits, and
/// padding.
const INFLIGHT_LEN: usize = 24;
/// The payload of a message with a descriptor of a ring: the index of the ring, and a flag that
/// there is no descriptor.
const RING_INDEX_MASK: u64 = 0xFF;
const RING_NO_FD: u64 = 0x100;

/// The answer to a message.
pub(super) enum Answer {
    /// No answer, or an acknowledgement if the front end asked for one.
    Done,
    /// A payload, and possibly a descriptor.
    Payload(Vec<u8>, Option<File>),
}

impl Answer {
    fn number(value: u64) -> Self {
        Self::Payload(value.to_ne_bytes().into(), None)
    }
}

/// Returns whether a message has an answer of its own, so that it cannot be refused by an
/// acknowledgement.
pub(super) fn answers_itself(code: u32) -> bool {
    use Code::{GET_INFLIGHT_FD, GET_VRING_BASE, SET_LOG_BASE};
    [SET_LOG_BASE, GET_VRING_BASE, GET_INFLIGHT_FD].map(u32::from).contains(&code)
}

/// Handles a message.
///
/// # Errors
/// [`Error::ReqHandlerError`] if the message is refused, with the reason. All other errors end the
/// connection.
pub(super) fn dispatch(
    inner: &Inner,
    stream: &UnixStream,
    session: &mut Session,
    mut message: Message,
) -> Result<Answer> {
    use Code::*;
    let code = Code::try_from(message.code)
        .map_err(|_| invalid(format!("message {} is not known", message.code)))?;
    let takes_fds = matches!(
        code,
        SET_MEM_TABLE
            | SET_VRING_CALL
            | SET_VRING_KICK
            | SET_VRING_ERR
            | SET_LOG_BASE
            | SET_LOG_FD
            | SET_BACKEND_REQ_FD
            | SET_INFLIGHT_FD
            | ADD_MEM_REG
            // Some front ends send the descriptor of the region with this message, too.
            | REM_MEM_REG
    );
    if message.has_fds() && !takes_fds {
        return Err(message.malformed());
    }
    if let Some(what) = message.refused_fd() {
        return not_taken(code, what);
    }
    match code {
        SET_MEM_TABLE | ADD_MEM_REG | REM_MEM_REG | GET_MAX_MEM_SLOTS => memory(session, code, message),
        GET_INFLIGHT_FD | SET_INFLIGHT_FD | SET_LOG_BASE => areas(session, code, message),
        SET_VRING_NUM | SET_VRING_ADDR | SET_VRING_BASE | GET_VRING_BASE | SET_VRING_ENABLE => {
            ring(session, code, &message)
        }
        SET_VRING_CALL | SET_VRING_KICK | SET_VRING_ERR => ring_fd(session, code, message),
        GET_CONFIG | SET_CONFIG => config(session, code, &message),
        NET_SET_MTU => {
            let mtu = message.exactly(8)?.u64(0);
            let network = inner.device.network().ok_or("this device has no MTU".to_owned());
            done(network.and_then(|network| network.set_mtu(mtu)).map_err(refuse))
        }
        SEND_RARP => {
            // The address, and two bytes of padding.
            let body = message.exactly(8)?;
            let mac = *body.0.first_chunk().expect("8 bytes");
            let network = inner.device.network().ok_or("this device is on no network".to_owned());
            done(network.and_then(|network| network.announce(mac)).map_err(refuse))
        }
        SET_BACKEND_REQ_FD => {
            let fd = message.file().ok_or_else(|| message.malformed())?;
            back_end_channel(inner, stream, fd.into())
        }
        // An eventfd for the dirty log, which no front end reads any more. It is closed.
        SET_LOG_FD => Ok(Answer::Done),
        _ => negotiation(session, code, &message),
    }
}

/// Handles a message whose descriptor was refused, because its close could block.
fn not_taken(code: Code, what: &str) -> Result<Answer> {
    use Code::{ADD_MEM_REG, REM_MEM_REG, SET_INFLIGHT_FD, SET_LOG_BASE, SET_LOG_FD, SET_MEM_TABLE};
    match code {
        // The descriptors of these messages are not used.
        SET_LOG_FD | REM_MEM_REG => Ok(Answer::Done),
        SET_MEM_TABLE | ADD_MEM_REG | SET_INFLIGHT_FD | SET_LOG_BASE => {
            Err(Error::ReqHandlerError(not_memory(what)))
        }
        _ => Err(refuse(format!("a descriptor is {what}, which is no eventfd, nor a UNIX socket"))),
    }
}

fn done(result: Result<()>) -> Result<Answer> {
    result.map(|()| Answer::Done)
}

fn refuse(why: String) -> Error {
    Error::ReqHandlerError(io::Error::other(why))
}

/// Checks that a protocol feature was negotiated.
///
/// # Errors
/// It was not.
fn need(session: &Session, feature: Protocol) -> Result<()> {
    if session.has(feature) { Ok(()) } else { Err(Error::InactiveOperation(feature)) }
}

/// Handles messages about features, the number of queues, and the state of the whole device.
fn negotiation(session: &mut Session, code: Code, message: &Message) -> Result<Answer> {
    use Code::*;
    match code {
        SET_FEATURES => return done(session.set_features(message.exactly(8)?.u64(0))),
        SET_PROTOCOL_FEATURES => return done(session.set_protocol_features(message.exactly(8)?.u64(0))),
        SET_STATUS => {
            session.set_status(message.exactly(8)?.u64(0));
            return Ok(Answer::Done);
        }
        _ => {}
    }
    message.exactly(0)?;
    match code {
        SET_OWNER => done(session.set_owner()),
        RESET_OWNER => done(session.reset_owner()),
        RESET_DEVICE => {
            need(session, Protocol::RESET_DEVICE)?;
            done(session.reset_device())
        }
        GET_FEATURES => session.get_features().map(Answer::number),
        GET_PROTOCOL_FEATURES => session.get_protocol_features().map(|all| Answer::number(all.bits())),
        GET_QUEUE_NUM => {
            need(session, Protocol::MQ)?;
            session.get_queue_num().map(Answer::number)
        }
        GET_STATUS => Ok(Answer::number(session.status())),
        _ => Err(invalid(format!("message {} is not served", message.code))),
    }
}

/// Handles messages about guest memory.
fn memory(session: &mut Session, code: Code, mut message: Message) -> Result<Answer> {
    match code {
        Code::SET_MEM_TABLE => {
            let (regions, files) = table(&mut message)?;
            return session.set_mem_table(&regions, files, None).map(|_| Answer::Done);
        }
        _ => need(session, Protocol::CONFIGURE_MEM_SLOTS)?,
    }
    if code == Code::GET_MAX_MEM_SLOTS {
        message.exactly(0)?;
        return session.get_max_mem_slots().map(Answer::number);
    }
    let body = message.exactly(REGIONS_AT + REGION_LEN)?;
    let word = |i: usize| body.u64(REGIONS_AT + 8 * i);
    let region = VhostUserSingleMemoryRegion::new(word(0), word(1), word(2), word(3));
    if !region.is_valid() {
        return Err(message.malformed());
    }
    if code == Code::REM_MEM_REG {
        return done(session.remove_mem_region(&region));
    }
    let file = message.file().ok_or_else(|| message.malformed())?;
    session.add_mem_region(&region, file, None).map(|_| Answer::Done)
}

/// Parses SET_MEM_TABLE: a count, padding, regions. User-mode Linux always sends room for two
/// regions, independent of the count.
pub(super) fn table(message: &mut Message) -> Result<(Vec<VhostUserMemoryRegion>, Vec<File>)> {
    let files = message.files();
    let body = message.body();
    let room = body.0.len().checked_sub(REGIONS_AT).ok_or_else(|| message.malformed())? / REGION_LEN;
    let count = body.u32(0) as usize;
    if count > room || files.len() != count {
        return Err(message.malformed());
    }
    let region = |number: usize| {
        let word = |i: usize| body.u64(REGIONS_AT + REGION_LEN * number + 8 * i);
        VhostUserMemoryRegion::new(word(0), word(1), word(2), word(3))
    };
    Ok(((0..count).map(region).collect(), files))
}

/// Handles messages about the in-flight region and the dirty log.
fn areas(session: &mut Session, code: Code, mut message: Message) -> Result<Answer> {
    let file = message.file();
    if code == Code::SET_LOG_BASE {
        need(session, Protocol::LOG_SHMFD)?;
        let body = message.exactly(16)?;
        let log = VhostUserLog::new(body.u64(0), body.u64(8));
        if !log.is_valid() {
            return Err(message.malformed());
        }
        session.set_log_base(&log, file.ok_or(Error::IncorrectFds)?)?;
        return Ok(Answer::Payload(body.0.to_vec(), None));
    }
    need(session, Protocol::INFLIGHT_SHMFD)?;
    let body = message.exactly(INFLIGHT_LEN)?;
    let area = VhostUserInflight::new(body.u64(0), body.u64(8), body.u16(16), body.u16(18));
    if !area.is_valid() {
        return Err(message.malformed());
    }
    if code == Code::SET_INFLIGHT_FD {
        return done(session.set_inflight_fd(&area, file.ok_or(Error::IncorrectFds)?));
    }
    let (area, file) = session.get_inflight_fd(&area)?;
    let mut reply = Vec::with_capacity(INFLIGHT_LEN);
    reply.extend_from_slice(&area.mmap_size.to_ne_bytes());
    reply.extend_from_slice(&area.mmap_offset.to_ne_bytes());
    reply.extend_from_slice(&area.num_queues.to_ne_bytes());
    reply.extend_from_slice(&area.queue_size.to_ne_bytes());
    reply.resize(INFLIGHT_LEN, 0);
    Ok(Answer::Payload(reply, Some(file)))
}

/// Handles messages about the size, the addresses and the state of a ring.
fn ring(session: &mut Session, code: Code, message: &Message) -> Result<Answer> {
    if code == Code::SET_VRING_ADDR {
        let body = message.exactly(40)?;
        let (descriptors, used, available) = (body.u64(8), body.u64(16), body.u64(24));
        let flags = VhostUserVringAddrFlags::from_bits(body.u32(4)).ok_or_else(|| message.malformed())?;
        // Alignment: Virtio 1.3, 2.7.
        if descriptors % 16 != 0 || available % 2 != 0 || used % 4 != 0 {
            return Err(message.malformed());
        }
        return done(session.set_vring_addr(body.u32(0), flags, descriptors, used, available, body.u64(32)));
    }
    let body = message.exactly(8)?;
    let (index, value) = (body.u32(0), body.u32(4));
    match code {
        Code::SET_VRING_NUM => done(session.set_vring_num(index, value)),
        Code::SET_VRING_BASE => done(session.set_vring_base(index, value)),
        Code::SET_VRING_ENABLE if value <= 1 => done(session.enable(index, value == 1).map_err(refuse)),
        Code::GET_VRING_BASE => {
            let state = session.get_vring_base(index)?;
            let (index, base) = (state.index, state.num);
            Ok(Answer::Payload([index.to_ne_bytes(), base.to_ne_bytes()].concat(), None))
        }
        _ => Err(message.malformed()),
    }
}

/// Handles messages with the kick, call or error descriptor of a ring.
fn ring_fd(session: &mut Session, code: Code, mut message: Message) -> Result<Answer> {
    let value = message.exactly(8)?.u64(0);
    let file = message.file();
    if file.is_some() == (value & RING_NO_FD != 0) {
        return Err(message.malformed());
    }
    file.as_ref().map_or(Ok(()), |file| session.check_room(file))?;
    let index = low_u8(value & RING_INDEX_MASK);
    done(match code {
        Code::SET_VRING_CALL => session.set_vring_call(index, file),
        Code::SET_VRING_KICK => session.set_vring_kick(index, file),
        _ => session.set_vring_err(index, file),
    })
}

/// Handles messages about the configuration space: an offset, a size, flags, and bytes of that
/// size.
fn config(session: &mut Session, code: Code, message: &Message) -> Result<Answer> {
    need(session, Protocol::CONFIG)?;
    let body = message.body();
    let (header, bytes) = body.0.split_at_checked(CONFIG_HEADER_LEN).ok_or_else(|| message.malformed())?;
    let (offset, size) = (body.u32(0), body.u32(4));
    let flags = VhostUserConfigFlags::from_bits(body.u32(8)).ok_or_else(|| message.malformed())?;
    let inside = offset.checked_add(size).is_some_and(|end| end <= CONFIG_BYTES_MAX);
    if size == 0 || !inside || bytes.len() != size as usize {
        return Err(message.malformed());
    }
    if code == Code::SET_CONFIG {
        return done(session.set_config(offset, bytes, flags));
    }
    let mut reply = header.to_vec();
    match session.get_config(offset, size, flags) {
        Ok(config) => reply.extend_from_slice(&config),
        // A size of 0 reports the error.
        Err(_) => reply.iter_mut().skip(4).take(4).for_each(|byte| *byte = 0),
    }
    Ok(Answer::Payload(reply, None))
}

/// Handles SET_BACKEND_REQ_FD, which brings the channel for messages to the front end.
fn back_end_channel(inner: &Inner, stream: &UnixStream, fd: OwnedFd) -> Result<Answer> {
    channel::write_only(&fd, Some(stream)).map_err(|e| {
        let why = format!("the back-end request channel is not usable: {e}");
        Error::ReqHandlerError(io::Error::new(e.kind(), why))
    })?;
    *inner.channel.locked() = Some(fd);
    Ok(Answer::Done)
}

//! A served image whose requests are carried out at once, one after the other, on files in memory.

use std::rc::Rc;
use std::sync::Arc;

use crate::memory::Memory;
use crate::{Buf, Chain, Context, Image, Layer, Op, Request, Served, Settings, Step, Storage, User, Waker};

const NO_WAKER: Waker = Waker { who: 0, token: 0 };

/// File 0 is the image, file 1 its data file, if it has one, file 2 the backing file.
pub(crate) struct Disk {
    pub(crate) files: [Rc<Memory>; 3],
    pub(crate) chain: Chain,
    pub(crate) user: User,
}

/// A request that stays in flight.
pub(crate) struct Started {
    pub(crate) request: Request,
    pub(crate) op: Op,
    pub(crate) guest: Vec<u8>,
    pub(crate) step: Step,
}

impl Disk {
    pub(crate) fn open(file: Memory, below: Option<Memory>) -> Self {
        Self::open_with(file, below, |image| image)
    }

    /// Opens an image in a file that keeps its length.
    pub(crate) fn open_fixed(file: Memory) -> Self {
        let bytes = file.len().unwrap();
        Self::open_with(file, None, |image| image.with_fixed_file(bytes))
    }

    fn open_with(file: Memory, below: Option<Memory>, with: impl FnOnce(Served) -> Served) -> Self {
        let header = Image::open(&file).unwrap().header().clone();
        let data = u16::from(header.data_file.is_some());
        let settings = Settings { file: 0, data, cache_bytes: None, writable: true, room: false };
        let image = Arc::new(with(Served::open(&file, header, settings).unwrap()));
        let layers = below.iter().map(|b| Layer::Raw { file: 2, size: b.len().unwrap() }).collect();
        let user = image.join();
        let other = || Rc::new(Memory::new(Vec::new(), 64 << 20));
        let below = below.map_or_else(other, Rc::new);
        Self { files: [Rc::new(file), other(), below], chain: Chain::new(image, layers), user }
    }

    fn with(&mut self, call: impl FnOnce(&mut Context<'_>) -> Step) -> Step {
        let (user, chain) = (&mut self.user, &self.chain);
        call(&mut Context { chain, user, waker: NO_WAKER, wake: &mut |_| {}, readonly: false })
    }

    /// Starts a request. Its first step is not carried out.
    pub(crate) fn start(&mut self, op: Op, pos: u64, guest: Vec<u8>, len: u64) -> Started {
        let mut request = Request::default();
        let step = self.with(|cx| request.start(op, pos, len, false, cx));
        Started { request, op, guest, step }
    }

    /// Carries out a request's step and continues the request. Returns false if it has ended.
    pub(crate) fn step(&mut self, started: &mut Started) -> bool {
        let Some(res) = self.perform(started) else { return false };
        self.wake(started, res);
        true
    }

    /// Carries out a request's step without telling the request.
    pub(crate) fn step_without_result(&mut self, started: &mut Started) {
        assert_eq!(self.perform(started), Some(0));
    }

    fn perform(&mut self, started: &mut Started) -> Option<i32> {
        let Started { request, op, guest, step } = started;
        let file = |n: &u16| &self.files[usize::from(*n)];
        let bytes = |range: &std::ops::Range<u64>| range.start as usize..range.end as usize;
        let done = match &*step {
            Step::Done(_) => return None,
            Step::Park => panic!("nobody else is there"),
            Step::Data { file: n, offset, data } if *op == Op::Read => {
                file(n).read_at(*offset, &mut guest[bytes(data)])
            }
            Step::Data { file: n, offset, data } => file(n).write_at(*offset, &guest[bytes(data)]),
            Step::Zeroes { data } => {
                guest[bytes(data)].fill(0);
                Ok(())
            }
            Step::Copy { data, at } => {
                let len = (data.end - data.start) as usize;
                guest[bytes(data)].copy_from_slice(&request.bytes(Buf::Data)[*at..][..len]);
                Ok(())
            }
            Step::Gather { data, at } => {
                let from = &guest[bytes(data)];
                request.bytes(Buf::Data)[*at..][..from.len()].copy_from_slice(from);
                Ok(())
            }
            Step::Read { file: n, offset, buf, range } => {
                file(n).read_at(*offset, &mut request.bytes(*buf)[range.clone()])
            }
            Step::Write { file: n, offset, buf, range } => {
                file(n).write_at(*offset, &request.bytes(*buf)[range.clone()])
            }
            Step::Around { file: n, offset, head, data, tail } => {
                let buf = request.bytes(Buf::Data);
                let all = [&buf[..*head], &guest[bytes(data)], &buf[*head..*head + *tail]].concat();
                file(n).write_at(*offset, &all)
            }
            Step::ZeroFile { file: n, offset, len, .. } | Step::Discard { file: n, offset, len } => {
                file(n).punch(*offset, *len)
            }
            Step::Extend { file: n, offset, len } => file(n).allocate(*offset, *len),
            Step::Sync { file: n } => file(n).sync(),
        };
        Some(if done.is_ok() { 0 } else { -28 })
    }

    /// Tells a request the result of its step without carrying it out.
    pub(crate) fn wake(&mut self, started: &mut Started, res: i32) {
        let (user, chain) = (&mut self.user, &self.chain);
        let mut cx = Context { chain, user, waker: NO_WAKER, wake: &mut |_| {}, readonly: false };
        started.step = started.request.resume(res, &mut cx);
    }

    /// Runs a request. Returns its result, and the guest's bytes.
    pub(crate) fn run(&mut self, op: Op, pos: u64, guest: Vec<u8>, len: u64) -> (i32, Vec<u8>) {
        let mut started = self.start(op, pos, guest, len);
        while self.step(&mut started) {}
        let Step::Done(res) = started.step else { unreachable!("it is over") };
        (res, started.guest)
    }

    pub(crate) fn write(&mut self, pos: u64, bytes: &[u8]) {
        assert_eq!(self.run(Op::Write, pos, bytes.to_vec(), bytes.len() as u64).0, 0);
    }

    pub(crate) fn read(&mut self, pos: u64, len: u64) -> Vec<u8> {
        let (res, bytes) = self.run(Op::Read, pos, vec![0; len as usize], len);
        assert_eq!(res, 0);
        bytes
    }

    pub(crate) fn other(&mut self, op: Op, pos: u64, len: u64) {
        assert_eq!(self.run(op, pos, Vec::new(), len).0, 0);
    }

    /// Ends the use in the regular way. Returns the image.
    pub(crate) fn close(mut self) -> Rc<Memory> {
        let image = self.chain.top().clone();
        let user = std::mem::replace(&mut self.user, image.join());
        image.leave(user);
        (0..3).for_each(|_| self.other(Op::Flush, 0, 0));
        self.files[0].clone()
    }
}

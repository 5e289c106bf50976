//! The device's own counters, compared with those of the driver.

use std::time::{Duration, Instant};

use serde::Serialize;
use vhost_kernel::Vhost;

use crate::error::{Error, Kind, Result, fail};

/// A worker may publish a completion up to this long before it counts it.
const LATE: Duration = Duration::from_secs(2);

/// Sum of the counters of all rings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Counters {
    /// Completed requests.
    pub requests: u64,
    /// Completed requests that failed.
    pub errors: u64,
    /// Completed requests that were not supported.
    pub unsupported: u64,
    /// Bytes that were read.
    pub read_bytes: u64,
    /// Bytes that were written.
    pub written_bytes: u64,
    /// Iterations of the worker that a kick started.
    pub kicks: u64,
    /// Notifications of the driver.
    pub signals: u64,
    /// Requests that were taken and not completed.
    pub in_flight: u64,
}

impl Counters {
    /// Reads the counters of `rings` rings.
    pub fn read(vhost: &Vhost, rings: u16) -> Result<Self> {
        let mut all = Self::default();
        for ring in 0..u32::from(rings) {
            let one = vhost.blk_vring_stats(ring).map_err(|e| Error::new(Kind::System, e.to_string()))?;
            if one.index != ring {
                return Err(fail!(
                    Io,
                    "the counters of ring {ring} were asked for, those of {} came",
                    one.index
                ));
            }
            all.requests += one.requests;
            all.errors += one.errors;
            all.unsupported += one.unsupported;
            all.read_bytes += one.read_bytes;
            all.written_bytes += one.written_bytes;
            all.kicks += one.kicks;
            all.signals += one.signals;
            all.in_flight += u64::from(one.in_flight);
        }
        Ok(all)
    }

    /// Returns the counts since `before`.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        Self {
            requests: self.requests - before.requests,
            errors: self.errors - before.errors,
            unsupported: self.unsupported - before.unsupported,
            read_bytes: self.read_bytes - before.read_bytes,
            written_bytes: self.written_bytes - before.written_bytes,
            kicks: self.kicks - before.kicks,
            signals: self.signals - before.signals,
            in_flight: self.in_flight,
        }
    }

    /// Reads the counters until they agree with `expected` in all values that a driver can know.
    ///
    /// # Errors
    /// They do not agree, although all requests were completed.
    pub fn expect(vhost: &Vhost, rings: u16, before: &Self, expected: &Self) -> Result<Self> {
        let deadline = Instant::now() + LATE;
        loop {
            let now = Self::read(vhost, rings)?.since(before);
            if now.known() == expected.known() {
                return Ok(now);
            }
            if Instant::now() > deadline {
                return Err(fail!(
                    Verify,
                    "the device counted (requests, errors, unsupported, bytes read, bytes written, in flight) {:?}, \
                     the driver {:?}",
                    now.known(),
                    expected.known()
                ));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn known(&self) -> (u64, u64, u64, u64, u64, u64) {
        (self.requests, self.errors, self.unsupported, self.read_bytes, self.written_bytes, self.in_flight)
    }
}

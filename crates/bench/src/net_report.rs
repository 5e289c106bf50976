//! The results of a run, as a table or as JSON. The keys of the JSON are an interface: keys may be
//! added, and are never renamed.

use std::fmt::Write as _;

use serde::Serialize;

use crate::report::Machine;
use crate::units::show_rate;
use vshunt_guest::driver::feature;
use vshunt_guest::net::{NetDevice, NetPlan, Outcome, PeerCounted, Tally};

/// One direction.
#[derive(Clone, Debug, Serialize)]
pub struct Flow {
    /// Number of frames.
    pub frames: u64,
    /// Bytes of these frames.
    pub bytes: u64,
    /// Frames per second.
    pub frames_per_s: f64,
    /// Million bits of frames per second.
    pub mbit_per_s: f64,
}

/// CPU time.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Cpu {
    /// Seconds.
    pub seconds: f64,
    /// Nanoseconds per frame that the guest sent or received. Null if there were none.
    pub ns_per_frame: Option<f64>,
}

/// The result of a run.
#[derive(Clone, Debug, Serialize)]
pub struct Summary {
    /// `source`, `sink` or `echo`.
    pub mode: &'static str,
    /// Number of queue pairs.
    pub pairs: u16,
    /// Threads of the guest.
    pub threads: usize,
    /// Lengths of frames.
    pub size: String,
    /// Number of flows.
    pub flows: u16,
    /// Frames of a batch.
    pub batch: u16,
    /// `split` or `packed`.
    pub ring: &'static str,
    /// Whether indirect descriptors were negotiated.
    pub indirect: bool,
    /// Whether EVENT_IDX was negotiated.
    pub event_idx: bool,
    /// Whether a frame could fill several buffers.
    pub merge: bool,
    /// Whether the device computed checksums.
    pub offloads: bool,
    /// Length of the run in seconds.
    pub seconds: f64,
    /// From the guest.
    pub sent: Flow,
    /// To the guest.
    pub received: Flow,
    /// Details of the received frames.
    pub check: Tally,
    /// Whether every byte was checked.
    pub verified: bool,
    /// Frames of an echo for which the transmit ring had no room.
    pub no_room: u64,
    /// The guest's notifications per frame. Null if there were no frames.
    pub kicks_per_frame: Option<f64>,
    /// The server's notifications per frame. Null if there were no frames.
    pub calls_per_frame: Option<f64>,
    /// CPU time of the guest's threads.
    pub client_cpu: Cpu,
    /// CPU time of the server. Null if it is not known.
    pub server_cpu: Option<Cpu>,
    /// Counts of the peer end. Null if there was none.
    pub peer: Option<PeerCounted>,
    /// Number of times that the server died and came back.
    pub reconnects: u32,
    /// The longest time without a server in milliseconds.
    pub outage_ms_max: f64,
    /// The machine.
    pub machine: Machine,
}

impl Summary {
    /// Computes the figures of a run.
    pub fn new(device: &NetDevice, plan: &NetPlan, outcome: &Outcome) -> Self {
        let seconds = outcome.elapsed.as_secs_f64().max(1e-9);
        let flow = |frames: u64, bytes: u64| Flow {
            frames,
            bytes,
            frames_per_s: frames as f64 / seconds,
            mbit_per_s: bytes as f64 * 8e-6 / seconds,
        };
        let frames = outcome.frames();
        let each = |what: f64| (frames > 0).then(|| what / frames as f64);
        let cpu = |time: std::time::Duration| Cpu {
            seconds: time.as_secs_f64(),
            ns_per_frame: each(time.as_secs_f64() * 1e9),
        };
        Self {
            mode: plan.mode.name(),
            pairs: plan.pairs,
            threads: plan.threads.clamp(1, usize::from(plan.pairs)),
            size: plan.sizes.name(),
            flows: plan.flows,
            batch: plan.batch,
            ring: if plan.packed { "packed" } else { "split" },
            indirect: device.has(feature::INDIRECT_DESC),
            event_idx: device.has(feature::EVENT_IDX),
            merge: device.has(feature::NET_MRG_RXBUF),
            offloads: device.has(feature::NET_CSUM),
            seconds,
            sent: flow(outcome.sent, outcome.sent_bytes),
            received: flow(outcome.received.frames, outcome.received.bytes),
            check: outcome.received.clone(),
            verified: plan.verify,
            no_room: outcome.no_room,
            kicks_per_frame: each(outcome.kicks as f64),
            calls_per_frame: each(outcome.calls as f64),
            client_cpu: cpu(outcome.client_cpu),
            server_cpu: outcome.server_cpu.map(cpu),
            peer: outcome.peer.clone(),
            reconnects: outcome.reconnects,
            outage_ms_max: outcome.outage.as_secs_f64() * 1e3,
            machine: Machine::here(),
        }
    }

    /// Returns the table for people.
    pub fn table(&self) -> String {
        let mut out = String::new();
        let on = |yes: bool, what: &str| if yes { format!(", {what}") } else { String::new() };
        let _ = writeln!(
            out,
            "{}: frames of {} bytes, {} flows, on {} queue pairs by {} threads, {} ring{}{}{}{}, {:.2} s",
            self.mode,
            self.size,
            self.flows,
            self.pairs,
            self.threads,
            self.ring,
            on(self.indirect, "indirect"),
            on(self.event_idx, "event index"),
            on(self.merge, "merged buffers"),
            on(self.offloads, "offloads"),
            self.seconds
        );
        for (name, flow) in [("sent", &self.sent), ("received", &self.received)] {
            if flow.frames > 0 || name == if self.mode == "source" { "sent" } else { "received" } {
                let rate = show_rate(flow.frames_per_s);
                let _ = writeln!(
                    out,
                    "{name:<9}{:>12} frames {rate:>8} frames/s {:>10.1} Mbit/s",
                    flow.frames, flow.mbit_per_s
                );
            }
        }
        if self.mode != "source" {
            tally(&mut out, "received:", &self.check, self.verified);
        }
        if self.no_room > 0 {
            let _ = writeln!(out, "not sent back for want of room: {}", self.no_room);
        }
        if let Some(peer) = &self.peer {
            self.far_table(&mut out, peer);
        }
        if let (Some(kicks), Some(calls)) = (self.kicks_per_frame, self.calls_per_frame) {
            let _ = writeln!(out, "notifications: {kicks:.4} a frame to the server, {calls:.4} from it");
        }
        let cpu = |cpu: Cpu| match cpu.ns_per_frame {
            Some(each) => format!("{:.2} s, {each:.0} ns a frame", cpu.seconds),
            None => format!("{:.2} s", cpu.seconds),
        };
        let server = self.server_cpu.map_or("unknown (give --server-pid)".into(), cpu);
        let _ = writeln!(out, "CPU: guest {}; server {server}", cpu(self.client_cpu));
        if self.reconnects > 0 {
            let _ =
                writeln!(out, "reconnects: {}, at most {:.0} ms away", self.reconnects, self.outage_ms_max);
        }
        let _ = writeln!(out, "machine: {} CPUs, Linux {}", self.machine.cpus, self.machine.kernel);
        out
    }

    fn far_table(&self, out: &mut String, peer: &PeerCounted) {
        if self.mode != "source" {
            let _ = writeln!(
                out,
                "peer end: {} frames sent ({} frames/s), {} found no room and count as lost, {:.2} s of CPU",
                peer.sent,
                show_rate(peer.sent as f64 / self.seconds),
                peer.refused,
                peer.cpu_s
            );
        }
        if self.mode != "sink" {
            let rate = show_rate(peer.arrived as f64 / self.seconds);
            let _ = writeln!(out, "peer end: {} frames arrived, {rate} frames/s", peer.arrived);
        }
        if let Some(seen) = &peer.received {
            tally(out, "peer end:", seen, true);
            if peer.socket_dropped > 0 {
                let dropped = peer.socket_dropped;
                let _ = writeln!(
                    out,
                    "peer end: {dropped} of those lost were dropped by its own packet socket, which was late"
                );
            }
        }
    }
}

fn tally(out: &mut String, name: &str, tally: &Tally, verified: bool) {
    let _ = write!(
        out,
        "{name} {} lost, {} late, {} twice, {} on another queue than before, {} of others",
        tally.lost.max(0),
        tally.late,
        tally.twice,
        tally.moved,
        tally.other
    );
    if verified {
        let _ = write!(out, "; {} damaged, {} wrong checksums", tally.damaged, tally.wrong_checksums);
    }
    out.push('\n');
}

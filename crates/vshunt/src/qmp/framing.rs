//! Splits a byte stream into JSON texts, as a QMP server has to. A request may arrive in pieces, or
//! several at once.
//!
//! Called by the reader thread of a client with the bytes of each `read`. The bytes are untrusted:
//! no code here allocates more than [`MESSAGE_BYTES_MAX`], recurses, or panics. The result does not
//! depend on how the bytes are divided into reads.
//!
//! Two extensions of QEMU's parser are supported: strings in single quotes (and `\'` in any
//! string), and recovery: a control character or the byte 0xFE or 0xFF discards an incomplete
//! message.

/// The bytes of the longest message. Longer messages are refused and skipped to the next line.
pub(crate) const MESSAGE_BYTES_MAX: usize = 1 << 20;

/// The deepest nesting of a message. It is below the limit of serde_json (128), so that the error
/// message comes from here.
pub(crate) const NESTING_MAX: u32 = 100;

const _: () = assert!(NESTING_MAX < 128);

/// A part of the stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum QmpFrame {
    /// A text with balanced brackets, with double quotes instead of single ones. It probably is
    /// JSON.
    Message(String),
    /// The reason why bytes were skipped. Parsing continues after them.
    Error(&'static str),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Between messages.
    Between,
    /// In a message, outside strings.
    Body,
    /// In a string that `quote` ends. `escaped`: the last byte was a backslash.
    Text { quote: u8, escaped: bool },
    /// After an error: bytes are skipped until a line ends or, if `line` is false, a bracket opens.
    Skip { line: bool },
}

/// The state of one stream.
#[derive(Debug)]
pub(crate) struct Framer {
    buffer: Vec<u8>,
    state: State,
    depth: u32,
}

impl Default for Framer {
    fn default() -> Self {
        Self::new()
    }
}

impl Framer {
    /// Makes the state of a new stream.
    pub(crate) fn new() -> Self {
        Self { buffer: Vec::new(), state: State::Between, depth: 0 }
    }

    /// Returns whether a message is incomplete.
    pub(crate) fn is_in_message(&self) -> bool {
        matches!(self.state, State::Body | State::Text { .. })
    }

    /// Parses `bytes`. Calls `emit` for each message or error that they complete.
    pub(crate) fn push(&mut self, bytes: &[u8], mut emit: impl FnMut(QmpFrame)) {
        for &byte in bytes {
            if let Some(frame) = self.byte(byte) {
                emit(frame);
            }
        }
    }

    fn byte(&mut self, byte: u8) -> Option<QmpFrame> {
        let white = matches!(byte, b' ' | b'\t' | b'\r' | b'\n');
        let resync = (byte < 0x20 && !white) || byte >= 0xFE;
        match self.state {
            State::Skip { .. } if byte == b'\n' => self.state = State::Between,
            State::Skip { line: true } => {}
            State::Between | State::Skip { .. } if matches!(byte, b'{' | b'[') => {
                self.state = State::Body;
                return self.body(byte);
            }
            State::Skip { .. } => {}
            State::Between if white => {}
            State::Between => return Some(self.fail("JSON parse error, expecting an object", false)),
            State::Body | State::Text { .. } if resync => {
                return Some(self.fail("JSON parse error, stray control character", false));
            }
            State::Body => return self.body(byte),
            State::Text { .. } if byte < 0x20 => {
                let frame = self.fail("JSON parse error, line break or tab in a string", false);
                if byte == b'\n' {
                    self.state = State::Between;
                }
                return Some(frame);
            }
            State::Text { quote, escaped } => return self.text(byte, quote, escaped),
        }
        None
    }

    fn body(&mut self, byte: u8) -> Option<QmpFrame> {
        match byte {
            b'{' | b'[' if self.depth == NESTING_MAX => {
                return Some(self.fail("JSON parse error, nested too deeply", true));
            }
            b'{' | b'[' => self.depth += 1,
            b'}' | b']' => self.depth -= 1,
            b'"' | b'\'' => {
                self.state = State::Text { quote: byte, escaped: false };
                return self.keep(b"\"");
            }
            _ => {}
        }
        if let Some(error) = self.keep(&[byte]) {
            return Some(error);
        }
        (self.depth == 0).then(|| self.finish())
    }

    fn text(&mut self, byte: u8, quote: u8, escaped: bool) -> Option<QmpFrame> {
        self.state = State::Text { quote, escaped: !escaped && byte == b'\\' };
        match (escaped, byte) {
            (false, b'\\') => None,
            (true, b'\'') => self.keep(b"'"),
            (true, _) => self.keep(&[b'\\', byte]),
            (false, _) if byte == quote => {
                self.state = State::Body;
                self.keep(b"\"")
            }
            (false, b'"') => self.keep(b"\\\""),
            (false, _) => self.keep(&[byte]),
        }
    }

    fn keep(&mut self, bytes: &[u8]) -> Option<QmpFrame> {
        if self.buffer.len() + bytes.len() > MESSAGE_BYTES_MAX {
            return Some(self.fail("message is longer than 1 MiB", true));
        }
        self.buffer.extend_from_slice(bytes);
        None
    }

    fn finish(&mut self) -> QmpFrame {
        self.state = State::Between;
        match String::from_utf8(std::mem::take(&mut self.buffer)) {
            Ok(text) => QmpFrame::Message(text),
            Err(_) => QmpFrame::Error("JSON parse error, invalid UTF-8"),
        }
    }

    fn fail(&mut self, why: &'static str, line: bool) -> QmpFrame {
        self.buffer = Vec::new();
        self.depth = 0;
        self.state = State::Skip { line };
        QmpFrame::Error(why)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::Value;

    use super::*;

    fn frames<'a>(pieces: impl IntoIterator<Item = &'a [u8]>) -> Vec<QmpFrame> {
        let mut framer = Framer::new();
        let mut out = Vec::new();
        pieces.into_iter().for_each(|p| framer.push(p, |f| out.push(f)));
        out
    }

    fn message(text: &str) -> QmpFrame {
        QmpFrame::Message(text.to_owned())
    }

    #[test]
    fn the_same_frames_wherever_a_read_is_cut() {
        let stream = "{\"execute\": \"a}\\\"{\", \"id\": [1, {\"é\": 2}]}\r\n{'b': 'it\\'s \"c\"'}[1]junk{}\n{\"d\": \"\n{}";
        let stream = stream.as_bytes();
        let want = frames([stream]);
        assert_eq!(want.len(), 7, "{want:?}");
        assert_eq!(want[1], message(r#"{"b": "it's \"c\""}"#));
        assert_eq!(want[2], message("[1]"));
        assert!(matches!(want[3], QmpFrame::Error(_)));
        assert_eq!((&want[4], &want[6]), (&message("{}"), &message("{}")));
        for cut in 0..=stream.len() {
            assert_eq!(frames([&stream[..cut], &stream[cut..]]), want, "cut at {cut}");
        }
        assert_eq!(frames(stream.chunks(1)), want);
    }

    #[test]
    fn a_control_character_brings_the_stream_back() {
        for bad in [0u8, 0x1b, 0xfe, 0xff] {
            let got = frames([b"{\"execute\": \"qu".as_slice(), &[bad], b" it\"}\n{\"a\":1}"]);
            assert_eq!(got.len(), 2, "{bad:#x}");
            assert!(matches!(got[0], QmpFrame::Error(_)));
            assert_eq!(got[1], message("{\"a\":1}"));
        }
    }

    #[test]
    fn long_and_deep_ones_are_refused_once() {
        let long = format!("{{\"a\": \"{}\"}}\n{{}}", "x".repeat(2 * MESSAGE_BYTES_MAX));
        assert_eq!(
            frames([long.as_bytes()]),
            [QmpFrame::Error("message is longer than 1 MiB"), message("{}")]
        );
        let deep = format!("{}\n{{}}", "[".repeat(5000));
        assert_eq!(
            frames([deep.as_bytes()]),
            [QmpFrame::Error("JSON parse error, nested too deeply"), message("{}")]
        );
        let deepest = format!("{}{}", "[".repeat(NESTING_MAX as usize), "]".repeat(NESTING_MAX as usize));
        assert_eq!(frames([deepest.as_bytes()]), [message(&deepest)]);
    }

    fn json() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            any::<String>().prop_map(Value::from),
        ];
        leaf.prop_recursive(4, 24, 5, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..5).prop_map(Value::from),
                prop::collection::hash_map(any::<String>(), inner, 0..5)
                    .prop_map(|m| Value::Object(m.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn any_bytes_in_any_pieces(bytes in prop::collection::vec(any::<u8>(), 0..300), cut in 0usize..300) {
            let cut = cut.min(bytes.len());
            prop_assert_eq!(frames([&bytes[..cut], &bytes[cut..]]), frames([bytes.as_slice()]));
        }

        #[test]
        fn any_brackets_and_quotes(text in "[]\\[{}'\",:\\\\ \na1]{0,200}") {
            for frame in frames([text.as_bytes()]) {
                if let QmpFrame::Message(m) = frame {
                    let bracketed = m.starts_with(['{', '[']) && m.ends_with(['}', ']']);
                    prop_assert!(bracketed, "{}", m);
                }
            }
        }

        #[test]
        fn objects_come_out_as_they_went_in(
            values in prop::collection::vec(prop::collection::vec(json(), 0..3).prop_map(Value::from), 0..4),
            gap in "[ \r\n\t]{0,3}",
        ) {
            let stream: String = values.iter().map(|v| format!("{v}{gap}")).collect();
            let got: Vec<Value> = frames([stream.as_bytes()])
                .into_iter()
                .map(|f| match f {
                    QmpFrame::Message(m) => serde_json::from_str(&m).unwrap(),
                    QmpFrame::Error(e) => panic!("{e}"),
                })
                .collect();
            prop_assert_eq!(got, values);
        }
    }
}

//! The part of HTTP/1.1 that a scrape needs: one request, one answer, end of the connection (RFC
//! 9112).
//!
//! It only converts bytes; `serve` has the sockets. The body of a request is not read, because no
//! supported request has one.

use httparse::{EMPTY_HEADER, Error, Header, Request, Status};

/// The most bytes of a request up to the empty line that ends its header. A scraper sends about
/// 300.
pub(super) const REQUEST_BYTES_MAX: usize = 8192;

/// The most header fields of a request.
const FIELDS_MAX: usize = 64;

/// The media type of the text. The text also is valid in the older format of Prometheus, where `#
/// UNIT` and `# EOF` are comments and a counter has no type.
const OPENMETRICS: &str = "application/openmetrics-text";
const OPENMETRICS_WHOLE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
const PROMETHEUS: &str = "text/plain; version=0.0.4; charset=utf-8";

const TEXT: &str = "text/plain; charset=utf-8";

/// The path of the metrics.
const PATH: &str = "/metrics";
/// The answer at `/`.
const ABOUT: &str =
    concat!("This is vshunt ", env!("CARGO_PKG_VERSION"), ". Metrics for Prometheus are at /metrics.\n");

/// The request in the bytes that have arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Asked {
    /// The request is incomplete.
    NotYet,
    /// A complete request: the page that the client gets, or the error.
    Whole {
        outcome: Result<Target, Refusal>,
        /// The method is HEAD: the answer has no body.
        head_only: bool,
    },
}

/// What a client asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Target {
    /// `/`: a sentence that names the path of the metrics.
    About,
    Metrics(Format),
}

/// The media type of the metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Format {
    OpenMetrics,
    Prometheus,
}

/// Why a request is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    BadRequest,
    NotFound,
    Method,
    TooLarge,
    Version,
}

/// Parses a request.
pub(super) fn read(bytes: &[u8]) -> Asked {
    let refused = |why| Asked::Whole { outcome: Err(why), head_only: false };
    let mut fields = [EMPTY_HEADER; FIELDS_MAX];
    let mut request = Request::new(&mut fields);
    match request.parse(bytes) {
        Ok(Status::Complete(_)) => {}
        Ok(Status::Partial) if bytes.len() < REQUEST_BYTES_MAX => return Asked::NotYet,
        Ok(Status::Partial) | Err(Error::TooManyHeaders) => return refused(Refusal::TooLarge),
        Err(Error::Version) => return refused(Refusal::Version),
        Err(_) => return refused(Refusal::BadRequest),
    }
    let outcome = match (request.path.map(path), request.method) {
        (Some(PATH), Some("GET" | "HEAD")) => Ok(Target::Metrics(format(request.headers))),
        (Some("/"), Some("GET" | "HEAD")) => Ok(Target::About),
        (Some(PATH | "/"), _) => Err(Refusal::Method),
        _ => Err(Refusal::NotFound),
    };
    Asked::Whole { outcome, head_only: request.method == Some("HEAD") }
}

/// Returns OpenMetrics if the client names it (RFC 9110, 12.5.1). Weights are ignored, because no
/// client names it to refuse it.
fn format(fields: &[Header<'_>]) -> Format {
    let accepts = |field: &&Header<'_>| field.name.eq_ignore_ascii_case("accept");
    let names =
        |field: &Header<'_>| String::from_utf8_lossy(field.value).to_ascii_lowercase().contains(OPENMETRICS);
    match fields.iter().filter(accepts).any(names) {
        true => Format::OpenMetrics,
        false => Format::Prometheus,
    }
}

/// Returns the path in the target of a request: without a query, and without the host that a proxy
/// names (`http://host/metrics`, RFC 9112, 3.2.2).
fn path(target: &str) -> &str {
    let path = match target.strip_prefix("http://") {
        Some(rest) => rest.find(['/', '?']).map_or("", |at| &rest[at..]),
        None => target,
    };
    match path.split('?').next() {
        // A host without a path is the root (RFC 9110, 4.2.3).
        None | Some("") => "/",
        Some(path) => path,
    }
}

/// Returns the header and the body of the answer at `/`.
pub(super) fn about() -> (Vec<u8>, &'static str) {
    (head("200 OK", TEXT, ABOUT.len(), ""), ABOUT)
}

impl Format {
    /// Returns the header of an answer with `length` bytes of metrics.
    pub(super) fn head(self, length: usize) -> Vec<u8> {
        let content_type = match self {
            Self::OpenMetrics => OPENMETRICS_WHOLE,
            Self::Prometheus => PROMETHEUS,
        };
        head("200 OK", content_type, length, "")
    }
}

impl Refusal {
    /// Returns the header of a refusal.
    pub(super) fn head(self) -> Vec<u8> {
        let (status, more) = match self {
            Self::BadRequest => ("400 Bad Request", ""),
            Self::NotFound => ("404 Not Found", ""),
            Self::Method => ("405 Method Not Allowed", "Allow: GET, HEAD\r\n"),
            Self::TooLarge => ("431 Request Header Fields Too Large", ""),
            Self::Version => ("505 HTTP Version Not Supported", ""),
        };
        head(status, TEXT, self.text().len(), more)
    }

    /// Returns the reason of a refusal, which is its body.
    pub(super) fn text(self) -> &'static str {
        match self {
            Self::BadRequest => "this is no HTTP request\n",
            Self::NotFound => "metrics are at /metrics\n",
            Self::Method => "only GET and HEAD are supported\n",
            Self::TooLarge => "the request is too long\n",
            Self::Version => "this HTTP version is not supported; use HTTP/1.1\n",
        }
    }
}

fn head(status: &str, content_type: &str, length: usize, more: &str) -> Vec<u8> {
    format!(
        "HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {length}\r\n{more}Connection: close\r\n\r\n"
    )
    .into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    const OK: Asked = Asked::Whole { outcome: Ok(Target::Metrics(Format::Prometheus)), head_only: false };
    const OPEN: Asked = Asked::Whole { outcome: Ok(Target::Metrics(Format::OpenMetrics)), head_only: false };

    const ABOUT: Asked = Asked::Whole { outcome: Ok(Target::About), head_only: false };

    const fn refused(why: Refusal) -> Asked {
        Asked::Whole { outcome: Err(why), head_only: false }
    }

    #[test]
    fn requests() {
        use Refusal::*;
        let cases = [
            ("GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n", OK),
            ("GET /metrics HTTP/1.0\r\n\r\n", OK),
            ("GET /metrics?x=/y HTTP/1.1\r\n\r\n", OK),
            ("GET http://a:9150/metrics HTTP/1.1\r\n\r\n", OK),
            (
                "GET /metrics HTTP/1.1\r\nACCEPT: a/b, Application/openmetrics-text;version=1.0.0\r\n\r\n",
                OPEN,
            ),
            ("GET /metrics HTTP/1.1\r\nAccept: a/b\r\naccept:application/openmetrics-text\r\n\r\n", OPEN),
            ("GET /metrics HTTP/1.1\r\nAccept: text/plain\r\nX: application/openmetrics-text\r\n\r\n", OK),
            (
                "HEAD /metrics HTTP/1.1\r\n\r\n",
                Asked::Whole { outcome: Ok(Target::Metrics(Format::Prometheus)), head_only: true },
            ),
            ("HEAD /x HTTP/1.1\r\n\r\n", Asked::Whole { outcome: Err(NotFound), head_only: true }),
            ("", Asked::NotYet),
            ("GET /met", Asked::NotYet),
            ("GET /metrics HTTP/1.1\r\nHost: a\r\n", Asked::NotYet),
            ("GET / HTTP/1.1\r\n\r\n", ABOUT),
            ("GET /?x HTTP/1.1\r\n\r\n", ABOUT),
            ("GET http://a/ HTTP/1.1\r\n\r\n", ABOUT),
            ("GET // HTTP/1.1\r\n\r\n", refused(NotFound)),
            ("GET http://a/x/?/metrics HTTP/1.1\r\n\r\n", refused(NotFound)),
            ("POST / HTTP/1.1\r\n\r\n", refused(Method)),
            ("GET /metrics/ HTTP/1.1\r\n\r\n", refused(NotFound)),
            ("GET http://a HTTP/1.1\r\n\r\n", ABOUT),
            ("OPTIONS * HTTP/1.1\r\n\r\n", refused(NotFound)),
            ("POST /metrics HTTP/1.1\r\n\r\nabc", refused(Method)),
            ("GET /metrics HTTP/2.0\r\n\r\n", refused(Version)),
            ("GET /metrics\r\n\r\n", refused(BadRequest)),
            ("\x16\x03\x01\x02", refused(BadRequest)),
            ("GET /metrics HTTP/1.1\r\nno colon\r\n\r\n", refused(BadRequest)),
        ];
        for (text, want) in cases {
            assert_eq!(read(text.as_bytes()), want, "{text:?}");
        }
    }

    #[test]
    fn a_request_has_a_bound() {
        let endless = format!("GET /metrics HTTP/1.1\r\nX: {}", "x".repeat(REQUEST_BYTES_MAX));
        assert_eq!(read(&endless.as_bytes()[..REQUEST_BYTES_MAX - 1]), Asked::NotYet);
        assert_eq!(read(&endless.as_bytes()[..REQUEST_BYTES_MAX]), refused(Refusal::TooLarge));
        let many = format!("GET /metrics HTTP/1.1\r\n{}\r\n", "a: b\r\n".repeat(FIELDS_MAX + 1));
        assert_eq!(read(many.as_bytes()), refused(Refusal::TooLarge));
    }
}

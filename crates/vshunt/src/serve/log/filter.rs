//! Which lines are written: `-v` and `-q`, and RUST_LOG.

use tracing::level_filters::LevelFilter;
use tracing_subscriber::filter::Targets;

use crate::config::args::LogArgs;
use crate::outcome::{Failure, Outcome};

/// The first parts of the names of modules that log.
const MODULES: [&str; 3] = ["vshunt", "virtio", "qcow2"];

/// Which lines are written.
pub(super) struct Filter {
    pub(super) targets: Targets,
    /// The most detailed level of any module.
    pub(super) level: LevelFilter,
    /// Names in RUST_LOG that stand for nothing.
    pub(super) unknown: Vec<String>,
}

/// Returns what the flags and the value of RUST_LOG ask for. Levels of modules come from RUST_LOG.
/// The level of all others comes from the flags, and without flags from RUST_LOG.
///
/// # Errors
/// RUST_LOG cannot be understood.
pub(super) fn wanted(args: LogArgs, variable: Option<String>) -> Outcome<Filter> {
    let flags = match (args.quiet, args.verbose) {
        (true, _) => Some(LevelFilter::ERROR),
        (_, 0) => None,
        (_, 1) => Some(LevelFilter::INFO),
        (_, 2) => Some(LevelFilter::DEBUG),
        _ => Some(LevelFilter::TRACE),
    };
    let text = variable.unwrap_or_default();
    let parsed = if text.is_empty() { Ok(Targets::new()) } else { text.parse() };
    let asked: Targets = parsed.map_err(|e| {
        Failure::Usage(format!(
            "RUST_LOG={text} is not understood ({e}); write a level or MODULE=LEVEL, joined by commas, for example \
             vshunt_vhost_user=debug, or unset it and give -v"
        ))
    })?;
    let base = flags.or(asked.default_level()).unwrap_or(LevelFilter::WARN);
    let of_modules: Vec<(String, LevelFilter)> =
        asked.iter().map(|(name, level)| (name.to_owned(), level)).collect();
    let (known, unknown): (Vec<_>, Vec<_>) = of_modules.into_iter().partition(|(name, _)| is_module(name));
    let level = known.iter().map(|(_, level)| *level).chain([base]).max().unwrap_or(base);
    Ok(Filter {
        targets: Targets::new().with_targets(known).with_default(base),
        level,
        unknown: unknown.into_iter().map(|(name, _)| name).collect(),
    })
}

fn is_module(name: &str) -> bool {
    MODULES.iter().any(|module| name.starts_with(module) || (!name.is_empty() && module.starts_with(name)))
}

#[cfg(test)]
mod tests {
    use tracing::Level;

    use super::*;

    fn filter(verbose: u8, quiet: bool, variable: &str) -> Filter {
        wanted(LogArgs { verbose, quiet }, Some(variable.to_owned())).unwrap()
    }

    #[test]
    fn flags_and_the_variable() {
        let cases = [
            (0, false, "", LevelFilter::WARN),
            (0, true, "", LevelFilter::ERROR),
            (1, false, "", LevelFilter::INFO),
            (2, false, "", LevelFilter::DEBUG),
            (9, false, "", LevelFilter::TRACE),
            (0, false, "debug", LevelFilter::DEBUG),
            (0, false, "off", LevelFilter::OFF),
            (1, false, "trace", LevelFilter::INFO),
            (0, true, "trace", LevelFilter::ERROR),
            (0, false, "vshunt_engine=trace", LevelFilter::TRACE),
            (0, false, "vshunt_engine=error", LevelFilter::WARN),
        ];
        for (verbose, quiet, variable, level) in cases {
            assert_eq!(filter(verbose, quiet, variable).level, level, "{verbose} {quiet} {variable}");
        }
        assert_eq!(wanted(LogArgs::default(), None).unwrap().level, LevelFilter::WARN);
        let some = filter(0, false, "error,vshunt_vhost_user=debug");
        assert!(some.targets.would_enable("vshunt_vhost_user::session", &Level::DEBUG));
        assert!(!some.targets.would_enable("vshunt_engine", &Level::WARN));
    }

    #[test]
    fn what_stands_for_nothing_is_named() {
        let named = |variable| filter(0, false, variable).unknown;
        assert_eq!(named("debgu"), ["debgu"]);
        assert_eq!(named("info,hyper=warn,vshunt=debug"), ["hyper"]);
        assert_eq!(named("vshunt_engine=debug"), Vec::<String>::new());
        assert_eq!(filter(0, false, "debgu").level, LevelFilter::WARN, "it changes nothing");
    }

    #[test]
    fn what_is_not_understood_is_refused() {
        for variable in ["vshunt=loud", "a=b=c"] {
            let Err(Failure::Usage(why)) = wanted(LogArgs::default(), Some(variable.into())) else {
                panic!("{variable}")
            };
            assert!(why.contains(&format!("RUST_LOG={variable} is not understood")), "{why}");
        }
    }
}

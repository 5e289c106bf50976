//! Names by which users of other programs look for a command of vshunt. Clap proposes commands that
//! are spelled alike, and `top` is no help for `stop`.

/// What to write in place of a command that there is not.
struct Other {
    /// The groups of commands in which the names are looked for; "": `vshunt` itself.
    groups: &'static [&'static str],
    names: &'static [&'static str],
    /// With the command between backticks.
    remedy: &'static str,
}

const OTHERS: &[Other] = &[
    Other {
        groups: &[""],
        names: &["stop", "shutdown", "exit", "kill", "end"],
        remedy: "`vshunt quit` ends the daemon",
    },
    Other { groups: &[""], names: &["start", "run", "daemon"], remedy: "`vshunt serve` starts a daemon" },
    Other {
        groups: &[""],
        names: &["umount", "unmount"],
        remedy: "umount MOUNTPOINT (without root: fusermount3 -u MOUNTPOINT) ends a mount, and so does `vshunt \
            export remove`",
    },
    Other {
        groups: &[""],
        names: &["delete", "del", "remove", "rm", "free"],
        remedy: "say of what: `vshunt disk remove`, `vshunt net remove`, `vshunt export remove`, `vshunt bitmap \
            remove`, `vshunt worker free`; `vshunt snapshot` has --delete",
    },
    Other {
        groups: &[""],
        names: &["validate", "check", "verify", "test", "lint"],
        remedy: "`vshunt config check` checks a configuration file, and `vshunt image check` an image",
    },
    Other {
        groups: &[""],
        names: &["list", "ls", "ps", "show", "info"],
        remedy: "`vshunt status` shows what runs, and `vshunt image info` describes an image",
    },
    Other {
        groups: &[""],
        names: &["create", "convert", "rebase", "map", "measure", "amend"],
        remedy: "commands for images that no program uses are those of `vshunt image`",
    },
    Other {
        groups: &["disk", "net", "export", "bitmap"],
        names: &["delete", "del", "rm", "free"],
        remedy: "it is called remove",
    },
    Other { groups: &["worker"], names: &["delete", "del", "rm", "remove"], remedy: "it is called free" },
    Other { groups: &["worker"], names: &["add", "create"], remedy: "it is called new" },
    Other {
        groups: &["disk", "net", "export", "bitmap"],
        names: &["new", "create"],
        remedy: "it is called add",
    },
    Other {
        groups: &["config"],
        names: &["validate", "verify", "test", "lint"],
        remedy: "it is called check",
    },
    Other { groups: &["job"], names: &["stop", "kill", "end", "abort"], remedy: "it is called cancel" },
];

/// Returns what to write in place of the command `name` of a group ("": of `vshunt` itself).
pub(super) fn remedy(group: &str, name: &str) -> Option<&'static str> {
    let of = |other: &&Other| other.groups.contains(&group) && other.names.contains(&name);
    OTHERS.iter().find(of).map(|other| other.remedy)
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::super::args::Cli;
    use super::*;

    #[test]
    fn names_are_no_commands_and_remedies_are() {
        let mut command = Cli::command();
        command.build();
        for other in OTHERS {
            for group in other.groups {
                let at = match *group {
                    "" => &command,
                    group => command.find_subcommand(group).expect(group),
                };
                for name in other.names {
                    assert!(at.find_subcommand(name).is_none(), "{group} {name}");
                }
                if let Some(called) = other.remedy.strip_prefix("it is called ") {
                    assert!(at.find_subcommand(called).is_some(), "{group} {called}");
                }
            }
            for written in other.remedy.split('`').skip(1).step_by(2) {
                let mut words = written.split(' ');
                assert_eq!(words.next(), Some("vshunt"), "{written}");
                words.fold(&command, |at, word| at.find_subcommand(word).expect(written));
            }
        }
    }
}

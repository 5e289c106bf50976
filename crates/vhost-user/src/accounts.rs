//! Numbers of users and groups. They come from the files in /etc only: other sources need a library
//! that connects to other programs, which the sandbox does not permit.
//!
//! Called by control threads.

use std::path::Path;

use vshunt_types::error::{Error, Result};

const USERS: &str = "/etc/passwd";
const GROUPS: &str = "/etc/group";
/// Bytes of such a file that are read.
const FILE_MAX: u64 = 16 << 20;

/// Returns the number of a user. `name` may be a number.
///
/// # Errors
/// There is no such user.
pub fn user(name: &str) -> Result<u32> {
    number("user", Path::new(USERS), name)
}

/// Returns the number of a group. `name` may be a number.
///
/// # Errors
/// There is no such group.
pub fn group(name: &str) -> Result<u32> {
    number("group", Path::new(GROUPS), name)
}

fn number(what: &str, file: &Path, name: &str) -> Result<u32> {
    if !name.is_empty() && name.bytes().all(|b| b.is_ascii_digit()) {
        // The highest number stands for "no change" in chown(2).
        return name.parse().ok().filter(|number| *number != u32::MAX).ok_or_else(|| {
            Error::invalid(format!("{name} is no {what}; the highest number is {}", u32::MAX - 1))
        });
    }
    let shown = file.display();
    let text = read(file).map_err(|e| Error::io(format!("cannot look for {what} {name} in {shown}"), e))?;
    // name:password:number:…
    let mut lines = text.lines().map(|line| line.split(':'));
    let number =
        lines.find_map(|mut line| if line.next()? == name { line.nth(1)?.parse().ok() } else { None });
    let number = number.filter(|number| *number != u32::MAX);
    number.ok_or_else(|| {
        Error::not_found(format!("there is no {what} {name} in {shown}; give one that is, or a number"))
    })
}

fn read(file: &Path) -> std::io::Result<String> {
    use std::io::Read;
    let mut bytes = Vec::new();
    std::fs::File::open(file)?.take(FILE_MAX).read_to_end(&mut bytes)?;
    // A line in another encoding hides no other line.
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use vshunt_types::error::Kind;

    use super::*;

    #[test]
    fn names_and_numbers() {
        assert_eq!((user("root").unwrap(), group("root").unwrap(), user("1234").unwrap()), (0, 0, 1234));
    }

    #[test]
    fn what_is_none_is_named() {
        let e = group("nonesuch").unwrap_err();
        assert_eq!(e.kind(), Kind::NotFound);
        assert_eq!(e.to_string(), "there is no group nonesuch in /etc/group; give one that is, or a number");
        for none in ["", "+1", "-1", " 1", "0x1"] {
            assert_eq!(user(none).unwrap_err().kind(), Kind::NotFound, "{none}");
        }
        for large in ["4294967295", "99999999999999999999"] {
            assert!(user(large).unwrap_err().to_string().contains("the highest number is 4294967294"));
        }
    }
}

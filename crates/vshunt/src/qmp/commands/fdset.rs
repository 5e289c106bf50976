//! `add-fd`, `remove-fd` and `query-fdsets`, as QEMU has them.

use serde::Deserialize;
use serde_json::json;

use crate::qmp::context::{Answer, Arguments, Context, Nothing};
use crate::qmp::message::QmpError;

/// The only command that takes a descriptor.
pub(crate) const ADD_FD: &str = "add-fd";

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct AddFd {
    /// The set. Absent: a new one.
    fdset_id: Option<i64>,
    /// A text that `query-fdsets` shows.
    opaque: Option<String>,
}

fn set_id(id: i64) -> Result<u32, QmpError> {
    u32::try_from(id).map_err(|_| {
        QmpError::generic("Parameter 'fdset-id' expects a non-negative value that fits into 32 bits")
    })
}

pub(crate) fn add_fd(context: &Context, mut arguments: Arguments) -> Answer {
    let fd = arguments.take_fd();
    let AddFd { fdset_id, opaque } = arguments.read()?;
    let id = fdset_id.map(set_id).transpose()?;
    let Some(fd) = fd else {
        return Err(QmpError::generic("No file descriptor supplied via SCM_RIGHTS"));
    };
    context.fdsets.add(id, opaque, fd)
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct RemoveFd {
    /// The set.
    fdset_id: i64,
    /// The number that `add-fd` returned. Absent: all descriptors of the set.
    fd: Option<i32>,
}

pub(crate) fn remove_fd(context: &Context, arguments: Arguments) -> Answer {
    let RemoveFd { fdset_id, fd } = arguments.read()?;
    context.fdsets.remove(set_id(fdset_id)?, fd, &context.daemon)?;
    Ok(json!({}))
}

pub(crate) fn query_fdsets(context: &Context, arguments: Arguments) -> Answer {
    arguments.read::<Nothing>()?;
    Ok(context.fdsets.list())
}

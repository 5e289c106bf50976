//! Feature bit numbers that belong to every device (Virtio 1.3, 2.2 and 6).

/// `VIRTIO_F_NOTIFY_ON_EMPTY` (legacy). It is never offered; the constant reserves the number.
pub const VIRTIO_F_NOTIFY_ON_EMPTY: u32 = 24;
/// `VIRTIO_F_ANY_LAYOUT` (legacy): a driver may split headers and data at any position. This always
/// holds in Virtio 1.x.
pub const VIRTIO_F_ANY_LAYOUT: u32 = 27;
/// `VIRTIO_RING_F_INDIRECT_DESC`: a descriptor may refer to a table of descriptors (2.7.5.3,
/// 2.8.7).
pub const VIRTIO_RING_F_INDIRECT_DESC: u32 = 28;
/// `VIRTIO_RING_F_EVENT_IDX`: notifications are requested by ring position (2.7.7, 2.7.10, 2.8.10).
pub const VIRTIO_RING_F_EVENT_IDX: u32 = 29;
/// `VHOST_USER_F_PROTOCOL_FEATURES`: a bit of vhost-user in the device's feature word.
pub const VHOST_USER_F_PROTOCOL_FEATURES: u32 = 30;
/// `VIRTIO_F_VERSION_1`: not a legacy device.
pub const VIRTIO_F_VERSION_1: u32 = 32;
/// `VIRTIO_F_ACCESS_PLATFORM` (formerly `VIRTIO_F_IOMMU_PLATFORM`): addresses pass an IOMMU.
pub const VIRTIO_F_ACCESS_PLATFORM: u32 = 33;
/// `VIRTIO_F_RING_PACKED`: packed virtqueues (2.8).
pub const VIRTIO_F_RING_PACKED: u32 = 34;
/// `VIRTIO_F_IN_ORDER`: buffers are used in the order in which they were made available.
pub const VIRTIO_F_IN_ORDER: u32 = 35;
/// `VIRTIO_F_ORDER_PLATFORM`: memory accesses are ordered as the platform orders them.
pub const VIRTIO_F_ORDER_PLATFORM: u32 = 36;
/// `VIRTIO_F_SR_IOV`: single root I/O virtualization.
pub const VIRTIO_F_SR_IOV: u32 = 37;
/// `VIRTIO_F_NOTIFICATION_DATA`: a notification carries data.
pub const VIRTIO_F_NOTIFICATION_DATA: u32 = 38;
/// `VIRTIO_F_NOTIF_CONFIG_DATA`: a notification carries a value of the device's choice.
pub const VIRTIO_F_NOTIF_CONFIG_DATA: u32 = 39;
/// `VIRTIO_F_RING_RESET`: one queue can be reset.
pub const VIRTIO_F_RING_RESET: u32 = 40;
/// `VHOST_F_LOG_ALL`: dirty pages are logged (vhost-user, "Migration").
pub const VHOST_F_LOG_ALL: u32 = 26;

/// Returns the mask of one feature bit.
pub const fn bit(number: u32) -> u64 {
    1 << number
}

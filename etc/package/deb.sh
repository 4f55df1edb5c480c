
case $DPKG_MAINTSCRIPT_NAME:$1 in
    preinst:upgrade) refuse_downgrade "$2" "@VERSION@" ;;
    postinst:configure)
        make_user
        # Which version was there, if any.
        after_install "${2:+yes}"
        ;;
    prerm:remove) before_removal ;;
    postrm:remove) after_removal ;;
    postrm:purge) after_purge ;;
esac
